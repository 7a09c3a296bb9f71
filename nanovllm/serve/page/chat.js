// The conversation.

import { streamAnswer } from "./api.js";
import { Answer, Question } from "./bubbles.js";
import "./cache.js";
import { element } from "./dom.js";
import { checkSettings, requestFields, systemMessages } from "./settings.js";
import { modelName } from "./state.js";
import { load, save } from "./storage.js";

/** What was said, oldest first; an answer has one or more choices. */
let turns = [];
let bubbles = [];
let running = null;
/** The question that is being edited; all after it will go. */
let editedFrom = null;

function addTurn(turn) {
  const at = turns.push(turn) - 1;
  const bubble =
    turn.role === "user" ? new Question(turn, () => edit(at)) : new Answer(turn, () => retry(at), keep);
  bubbles.push(bubble);
  return bubble;
}

/** Drops the turns from one on. */
function cut(start) {
  turns.splice(start);
  for (const bubble of bubbles.splice(start)) bubble.remove();
}

function keep() {
  // Tokens with their alternatives are large.
  const light = turns.map((turn) => ({ ...turn, choices: turn.choices?.map((data) => ({ ...data, tokens: [] })) }));
  while (!save("conversation", light) && light.length) light.splice(0, 2);
}

function messageOf({ role, content, choices, chosen }) {
  return { role, content: choices ? choices[chosen].content : content };
}

function requestBody() {
  return {
    model: modelName(),
    messages: [...systemMessages(), ...turns.map(messageOf)],
    separate_reasoning: true,
    stream: true,
    stream_options: { include_usage: true },
    ...requestFields(),
  };
}

function newAnswer(body) {
  const isJson = Boolean(body.response_format);
  const choice = () => ({ content: "", reasoning: "", tokens: [], isJson });
  const choices = Array.from({ length: body.n ?? 1 }, choice);
  return { role: "assistant", choices, chosen: 0, meta: "broken off" };
}

function showError(message) {
  element("error").textContent = message;
  element("error").hidden = !message;
}

function setRunning(controller) {
  const hadFocus = document.activeElement === element("stop");
  running = controller;
  element("chat").classList.toggle("running", Boolean(controller));
  element("stop").hidden = !controller;
  element("send").hidden = Boolean(controller);
  if (hadFocus) element("prompt").focus();
}

/** Answers the conversation, whose last turn is a question. */
async function ask() {
  const body = requestBody();
  const answer = addTurn(newAnswer(body));
  answer.begin();
  answer.meta.textContent = "";
  showError("");
  const controller = new AbortController();
  setRunning(controller);
  let note = "";
  try {
    await streamAnswer(body, controller.signal, (chunk) => answer.take(chunk));
  } catch (error) {
    note = controller.signal.aborted ? "stopped" : "broken off";
    if (!controller.signal.aborted) showError(error.message);
    if (error.status === 401) element("settings").open = true;
  }
  if (running === controller) setRunning(null);
  if (bubbles.includes(answer)) settle(answer, note);
}

/** Keeps an exchange, or gives the user the question back if there was no answer. */
function settle(answer, note) {
  answer.end(note);
  if (note && !answer.turn.choices.some(({ content }) => content)) giveBack();
  keep();
}

function giveBack() {
  const question = turns.at(-2);
  cut(turns.length - 2);
  element("prompt").value ||= question.content;
}

function retry(at) {
  if (running || !checkSettings()) return;
  setEdited(null);
  cut(at);
  ask();
}

function edit(at) {
  if (running) return;
  setEdited(at);
  element("prompt").value = turns[at].content;
  element("prompt").focus();
}

function setEdited(at) {
  editedFrom = at;
  element("editing").hidden = at === null;
  bubbles.forEach((bubble, i) => bubble.article.classList.toggle("dropped", at !== null && i >= at));
}

function clear() {
  running?.abort();
  setEdited(null);
  cut(0);
  keep();
  showError("");
  element("prompt").focus();
}

function send(text) {
  if (running || !text.trim() || !checkSettings()) return;
  if (editedFrom !== null) cut(editedFrom);
  setEdited(null);
  element("prompt").value = "";
  addTurn({ role: "user", content: text.trim() });
  ask();
}

function restore() {
  for (const turn of load("conversation", [])) addTurn(turn);
  // The page may have been left before there was an answer.
  if (turns.length && !turns.at(-1).choices?.some(({ content }) => content)) giveBack();
}

element("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send(element("prompt").value);
});
element("stop").addEventListener("click", () => running?.abort());
element("clear").addEventListener("click", clear);
element("cancel").addEventListener("click", () => {
  setEdited(null);
  element("prompt").value = "";
});
element("show_probabilities").addEventListener("change", () => bubbles.forEach((bubble) => bubble.draw()));
for (const example of document.querySelectorAll("#examples button")) {
  example.addEventListener("click", () => send(example.textContent));
}
element("prompt").addEventListener("keydown", (event) => {
  // Enter also ends a composed character, and on a phone it is the only way to a new line.
  const isEnd = event.key === "Enter" && !event.shiftKey && !event.isComposing;
  if (!isEnd || matchMedia("(pointer: coarse)").matches) return;
  event.preventDefault();
  element("composer").requestSubmit();
});
addEventListener("pagehide", keep);
restore();
