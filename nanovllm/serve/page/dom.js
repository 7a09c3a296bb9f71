// Nodes of the page. Text is only ever put into text nodes, so that markup in it stays text.

const COPIED_MS = 1500;

export const element = (id) => document.getElementById(id);

export function make(tag, className = "", text = "") {
  const node = document.createElement(tag);
  node.className = className;
  node.textContent = text;
  return node;
}

export function add(parent, tag, className = "", text = "") {
  return parent.appendChild(make(tag, className, text));
}

export function addButton(parent, label, action) {
  const button = add(parent, "button", "small", label);
  button.type = "button";
  button.addEventListener("click", action);
  return button;
}

/** Adds a button that copies a text, which `text` returns. */
export function addCopyButton(parent, text) {
  const button = addButton(parent, "Copy", async () => {
    await copy(text());
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), COPIED_MS);
  });
}

async function copy(text) {
  // Browsers have a clipboard for pages of this machine and by HTTPS alone.
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const field = add(document.body, "textarea", "hidden");
  field.value = text;
  field.select();
  document.execCommand("copy");
  field.remove();
}
