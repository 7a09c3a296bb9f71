// What a tab of the browser keeps until it is closed.

const PREFIX = "nanovllm-";

/** Returns what was kept under a name, `otherwise` if there is nothing. */
export function load(name, otherwise) {
  const text = sessionStorage.getItem(PREFIX + name);
  return text === null ? otherwise : JSON.parse(text);
}

/** Keeps a value, unless it is too large for the browser; returns whether it is kept. */
export function save(name, value) {
  try {
    sessionStorage.setItem(PREFIX + name, JSON.stringify(value));
    return true;
  } catch (error) {
    if (error.name !== "QuotaExceededError") throw error;
    return false;
  }
}
