// The page's chat and the server's state. What it keeps, the key included, is gone when the browser's tab is closed.

const element = (id) => document.getElementById(id);
const PREFIX = "nanovllm-";
const POLL_MS = 1000;
const TIMEOUT_MS = 5000;
const FIELDS = ["key", "temperature", "top_p", "max_tokens", "seed", "system"].map(element);

/** The conversation, oldest message first: role, content, and an answer's reasoning and meta. */
let messages = [];
/** Aborts the answer under way; null: there is none. */
let running = null;
let modelName;

// Storage.

function load(name, otherwise) {
  return JSON.parse(sessionStorage.getItem(PREFIX + name)) ?? otherwise;
}

function save(name, value) {
  try {
    sessionStorage.setItem(PREFIX + name, JSON.stringify(value));
  } catch (error) {
    // A conversation may be too long to keep.
    if (error.name !== "QuotaExceededError") throw error;
  }
}

// Requests.

class RequestError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** Returns why a request was refused; a proxy may have answered with something other than the server's JSON. */
async function refusal(response) {
  const text = await response.text();
  const isJson = response.headers.get("Content-Type")?.startsWith("application/json");
  const message = isJson ? JSON.parse(text).error?.message : undefined;
  return new RequestError(message ?? `${response.status} ${response.statusText} ${text.slice(0, 200)}`, response.status);
}

/** Sends a request with the key; throws a RequestError unless it succeeds. */
async function call(path, options = {}) {
  const headers = new Headers({ "Content-Type": "application/json" });
  const key = element("key").value.trim();
  if (key) headers.set("Authorization", `Bearer ${key}`);
  const response = await fetch(path, { ...options, headers }).catch((error) => {
    throw error instanceof TypeError ? new RequestError("The server cannot be reached.") : error;
  });
  if (!response.ok) throw await refusal(response);
  return response;
}

/** Yields the data of server-sent events. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    const blocks = (rest + part.value).split(/\r?\n\r?\n/);
    rest = blocks.pop();
    for (const block of blocks) {
      const lines = block.split(/\r?\n/).filter((line) => line.startsWith("data:"));
      if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
    }
  }
}

/** Yields the chunks of a streamed chat completion until it is complete. */
async function* chunks(body, signal) {
  const response = await call("v1/chat/completions", { method: "POST", body: JSON.stringify(body), signal });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new RequestError(chunk.error.message, chunk.error.code);
    yield chunk;
  }
  throw new RequestError("The answer broke off.");
}

function requestBody() {
  const system = element("system").value.trim();
  const number = (id) => (element(id).value === "" ? undefined : element(id).valueAsNumber);
  const said = messages.map(({ role, content }) => ({ role, content }));
  return {
    model: modelName,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...said],
    separate_reasoning: true,
    stream: true,
    stream_options: { include_usage: true },
    ...Object.fromEntries(["temperature", "top_p", "max_tokens", "seed"].map((id) => [id, number(id)])),
  };
}

// The conversation.

function make(parent, tag, className, text = "") {
  const node = parent.appendChild(document.createElement(tag));
  node.className = className;
  node.textContent = text;
  return node;
}

/** Adds a message to the conversation and to the page; returns what shows its present state. */
function addMessage(message) {
  messages.push(message);
  const article = make(element("messages"), "article", message.role);
  article.setAttribute("aria-label", message.role === "user" ? "You" : "Model");
  if (message.role === "user") {
    make(article, "div", "text", message.content);
    return { article };
  }
  const details = make(article, "details", "reasoning");
  make(details, "summary", "", "Thoughts");
  const [reasoning, content] = [make(details, "div", "text"), make(article, "div", "text")];
  const meta = make(article, "p", "meta");
  const show = () => {
    details.hidden = !message.reasoning;
    // Setting an equal text would end what the reader has selected.
    for (const [node, text] of [[reasoning, message.reasoning], [content, message.content], [meta, message.meta]]) {
      if (node.textContent !== text) node.textContent = text;
    }
  };
  show();
  return { article, show };
}

/** Drops the messages from one on. */
function cut(start) {
  messages.splice(start);
  while (element("messages").children.length > start) element("messages").lastChild.remove();
}

function showError(message) {
  element("error").textContent = message;
  element("error").hidden = !message;
}

function setRunning(controller) {
  running = controller;
  element("stop").hidden = !controller;
  element("send").hidden = Boolean(controller);
}

/** Reads an answer into a message, and returns how it ended and how fast it was. */
async function read(body, signal, message, show) {
  const began = performance.now();
  let firstAt, numTokens, drawing, reason;
  try {
    for await (const chunk of chunks(body, signal)) {
      numTokens = chunk.usage?.completion_tokens ?? numTokens;
      for (const { delta, finish_reason } of chunk.choices) {
        if (delta.content || delta.reasoning_content) firstAt ??= performance.now();
        message.content += delta.content ?? "";
        message.reasoning += delta.reasoning_content ?? "";
        reason = finish_reason ?? reason;
      }
      drawing ??= requestAnimationFrame(() => (drawing = show()));
    }
  } finally {
    cancelAnimationFrame(drawing);
  }
  const notes = reason === "length" ? ["cut at the most tokens"] : [];
  if (numTokens) notes.push(`${numTokens} tokens`);
  if (firstAt) notes.push(`first after ${Math.round(firstAt - began)} ms`);
  const seconds = (performance.now() - firstAt) / 1000;
  if (numTokens > 1 && seconds > 0) notes.push(`${format((numTokens - 1) / seconds)} tokens/s`);
  return notes.join(" · ");
}

/** Answers the conversation, whose last message is a question. */
async function ask() {
  const body = requestBody();
  const message = { role: "assistant", content: "", reasoning: "", meta: "" };
  const { article, show } = addMessage(message);
  article.setAttribute("aria-busy", "true");
  showError("");
  const controller = new AbortController();
  setRunning(controller);
  let failed = false;
  try {
    message.meta = await read(body, controller.signal, message, show);
  } catch (error) {
    failed = true;
    message.meta = controller.signal.aborted ? "stopped" : "broken off";
    if (!controller.signal.aborted) showError(error.message);
    if (error.status === 401) element("settings").open = true;
  }
  article.removeAttribute("aria-busy");
  show();
  if (running === controller) setRunning(null);
  // The conversation may have been cleared meanwhile.
  if (failed && message === messages.at(-1) && !message.content && !message.reasoning) giveBack();
  save("conversation", messages);
}

/** Moves the last question, which has no answer, back to the field. */
function giveBack() {
  const { content } = messages.findLast(({ role }) => role === "user");
  cut(messages.findLastIndex(({ role }) => role === "user"));
  element("prompt").value ||= content;
}

function send() {
  const text = element("prompt").value.trim();
  if (running || !text) return;
  if (!element("fields").checkValidity()) {
    element("settings").open = true;
    element("fields").reportValidity();
    return;
  }
  element("prompt").value = "";
  addMessage({ role: "user", content: text });
  ask();
}

function clear() {
  running?.abort();
  cut(0);
  save("conversation", messages);
  showError("");
  element("prompt").focus();
}

// The server's state.

const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
const percent = new Intl.NumberFormat("en", { style: "percent", maximumFractionDigits: 1 });
const format = (value) => compact.format(value);
let last;

function showState(sample) {
  modelName = sample.model;
  element("model").textContent = [sample.model, sample.device].filter(Boolean).join(" · ");
  // A server that has been started again counts from zero.
  const since = last && last.num_output_tokens <= sample.num_output_tokens ? last : sample;
  sample.output_rate = (sample.num_output_tokens - since.num_output_tokens) / (sample.time - since.time || 1);
  last = sample;
  for (const node of document.querySelectorAll("[data-value]")) {
    const { value } = node.dataset;
    node.textContent = (value === "cache_use" ? percent : compact).format(sample[value]);
  }
}

function setStatus(text) {
  // Screen readers speak every change.
  if (element("status").textContent !== text) element("status").textContent = text;
  element("status").classList.toggle("live", text === "live");
}

async function poll() {
  const key = element("key").value;
  let isRefused = false;
  if (!document.hidden) {
    try {
      showState(await (await call("stats", { signal: AbortSignal.timeout(TIMEOUT_MS) })).json());
      setStatus("live");
    } catch (error) {
      isRefused = error.status === 401;
      setStatus(isRefused ? "needs an API key" : error.message);
      if (isRefused) element("settings").open = true;
    }
  }
  // Only another key can help.
  if (isRefused && key === element("key").value) element("key").addEventListener("change", poll, { once: true });
  else setTimeout(poll, POLL_MS);
}

for (const field of FIELDS) field.value = load("settings", {})[field.id] ?? "";
element("fields").addEventListener("submit", (event) => event.preventDefault());
element("fields").addEventListener("input", () => {
  save("settings", Object.fromEntries(FIELDS.map((field) => [field.id, field.value])));
});
element("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
element("stop").addEventListener("click", () => running?.abort());
element("clear").addEventListener("click", clear);
element("prompt").addEventListener("keydown", (event) => {
  // Enter also ends a composed character, and on a phone it is the only way to a new line.
  const isEnd = event.key === "Enter" && !event.shiftKey && !event.isComposing;
  if (!isEnd || matchMedia("(pointer: coarse)").matches) return;
  event.preventDefault();
  element("composer").requestSubmit();
});
addEventListener("pagehide", () => save("conversation", messages));
element("settings").open = matchMedia("(min-width: 56rem)").matches;
for (const message of load("conversation", [])) addMessage(message);
// The page may have been left before there was an answer.
if (messages.length && !messages.at(-1).content && !messages.at(-1).reasoning) giveBack();
poll();
