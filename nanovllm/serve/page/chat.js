// The conversation.

import { streamAnswer } from "./api.js";
import { format, modelName } from "./state.js";

const element = (id) => document.getElementById(id);

let messages = [];
let running = null;

function add(parent, tag, className) {
  const child = document.createElement(tag);
  child.className = className;
  parent.append(child);
  return child;
}

/** A message on the page. Text is only ever put into text nodes, so that markup in it stays text. */
class Bubble {
  constructor(role, text = "") {
    this.article = add(element("messages"), "article", role);
    this.article.setAttribute("aria-label", role === "user" ? "You" : "Model");
    this.node = add(this.article, "div", "text").appendChild(new Text(text));
  }

  remove() {
    this.article.remove();
  }
}

/** The model's answer, as it comes. */
class Answer extends Bubble {
  constructor() {
    super("assistant");
    this.article.setAttribute("aria-busy", "true");
    this.began = performance.now();
    this.reasoning = null;
    this.finishReason = null;
    this.numTokens = null;
  }

  get content() {
    return this.node.data;
  }

  take(chunk) {
    this.numTokens = chunk.usage?.completion_tokens ?? this.numTokens;
    const [choice] = chunk.choices;
    if (!choice) return;
    const { content, reasoning_content: reasoning } = choice.delta;
    if (content || reasoning) this.firstAt ??= performance.now();
    if (reasoning) this.addReasoning(reasoning);
    if (content) this.node.appendData(content);
    this.finishReason = choice.finish_reason ?? this.finishReason;
  }

  addReasoning(text) {
    if (!this.reasoning) {
      const details = add(this.article, "details", "reasoning");
      this.article.prepend(details);
      add(details, "summary", "").textContent = "Thoughts";
      this.reasoning = add(details, "div", "text").appendChild(new Text());
    }
    this.reasoning.appendData(text);
  }

  /** Notes below the answer how it ended and how fast it was. */
  end(note) {
    this.article.removeAttribute("aria-busy");
    const notes = [note];
    if (this.numTokens !== null) notes.push(`${this.numTokens} tokens`);
    if (this.firstAt) {
      const seconds = (performance.now() - this.firstAt) / 1000;
      notes.push(`first after ${Math.round(this.firstAt - this.began)} ms`);
      if (this.numTokens > 1) notes.push(`${format((this.numTokens - 1) / seconds)} tokens/s`);
    }
    add(this.article, "p", "meta").textContent = notes.filter(Boolean).join(" · ");
  }
}

function requestBody(conversation) {
  const system = element("system").value.trim();
  const number = (id) => (element(id).value === "" ? undefined : element(id).valueAsNumber);
  return {
    model: modelName(),
    messages: system ? [{ role: "system", content: system }, ...conversation] : conversation,
    temperature: number("temperature"),
    max_tokens: number("max_tokens"),
    separate_reasoning: true,
    stream: true,
    stream_options: { include_usage: true },
  };
}

function showError(message) {
  element("error").textContent = message;
  element("error").hidden = !message;
}

function setRunning(controller) {
  const hadFocus = document.activeElement === element("stop");
  running = controller;
  element("stop").hidden = !controller;
  element("send").hidden = Boolean(controller);
  if (hadFocus) element("prompt").focus();
}

async function send(text) {
  const conversation = messages;
  conversation.push({ role: "user", content: text });
  const question = new Bubble("user", text);
  const answer = new Answer();
  showError("");
  setRunning(new AbortController());
  const { signal } = running;
  let note = "broken off";
  try {
    await streamAnswer(requestBody(conversation), signal, (chunk) => answer.take(chunk));
    note = answer.finishReason === "length" ? "cut at the most tokens" : "";
  } catch (error) {
    if (signal.aborted) note = "stopped";
    else showError(error.message);
    if (error.status === 401) element("settings").open = true;
  }
  setRunning(null);
  if (conversation === messages) settle(question, answer, note);
}

/** Keeps an exchange, or gives the user the question back if there was no answer. */
function settle(question, answer, note) {
  if (answer.content || !note) {
    messages.push({ role: "assistant", content: answer.content });
    answer.end(note);
    return;
  }
  const { content } = messages.pop();
  element("prompt").value ||= content;
  question.remove();
  answer.remove();
}

function clear() {
  messages = [];
  running?.abort();
  showError("");
  element("messages").replaceChildren();
  element("prompt").focus();
}

function submit(event) {
  event.preventDefault();
  const text = element("prompt").value.trim();
  if (running || !text) return;
  if (!element("fields").checkValidity()) {
    element("settings").open = true;
    element("fields").reportValidity();
    return;
  }
  element("prompt").value = "";
  send(text);
}

element("composer").addEventListener("submit", submit);
element("fields").addEventListener("submit", (event) => event.preventDefault());
element("stop").addEventListener("click", () => running?.abort());
element("clear").addEventListener("click", clear);
element("prompt").addEventListener("keydown", (event) => {
  // Enter also ends a composed character, and on a phone it is the only way to a new line.
  const isEnd = event.key === "Enter" && !event.shiftKey && !event.isComposing;
  if (!isEnd || matchMedia("(pointer: coarse)").matches) return;
  event.preventDefault();
  element("composer").requestSubmit();
});
