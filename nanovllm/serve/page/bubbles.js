// The messages of the conversation on the page.

import { add, addButton, addCopyButton, element, make } from "./dom.js";
import { codeNode, showMarkdown } from "./markdown.js";
import { showsProbabilities } from "./settings.js";
import { format } from "./state.js";
import { showTokens } from "./tokens.js";

// What came in less says nothing of the model's speed.
const LEAST_SECONDS = 0.1;

function setMode(container, mode) {
  if (container.dataset.mode !== mode) container.replaceChildren();
  container.dataset.mode = mode;
}

function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    // It is not complete yet.
    return text;
  }
}

/** One of the answers to a question. */
class Choice {
  constructor(parent, data) {
    this.data = data;
    this.node = add(parent, "div", "choice");
    this.text = add(this.node, "div", "text");
    this.actions = add(this.node, "div", "actions");
    addCopyButton(this.actions, () => data.content);
  }

  draw() {
    const { content, tokens, isJson, reasoning } = this.data;
    if (reasoning) this.drawReasoning(reasoning);
    const mode = tokens?.length && showsProbabilities() ? "tokens" : isJson ? "json" : "markdown";
    setMode(this.text, mode);
    if (mode === "tokens") showTokens(this.text, tokens);
    else if (mode === "json") this.text.replaceChildren(codeNode(indented(content), "JSON"));
    else showMarkdown(this.text, content);
  }

  drawReasoning(text) {
    if (!this.reasoning) {
      const details = make("details", "reasoning");
      this.node.prepend(details);
      add(details, "summary", "", "Thoughts");
      this.reasoning = add(details, "div", "text").appendChild(new Text());
    }
    this.reasoning.data = text;
  }
}

/** A message on the page. */
class Bubble {
  constructor(role, label) {
    this.article = add(element("messages"), "article", role);
    this.article.setAttribute("aria-label", label);
  }

  draw() {}

  remove() {
    this.article.remove();
  }
}

/** What the user has asked. */
export class Question extends Bubble {
  constructor(turn, edit) {
    super("user", "You");
    add(this.article, "div", "text", turn.content);
    addButton(add(this.article, "div", "actions"), "Edit", edit);
  }
}

/** The model's answers to a question, as they come. */
export class Answer extends Bubble {
  constructor(turn, retry, choose) {
    super("assistant", "Model");
    this.turn = turn;
    const row = add(this.article, "div", "choices");
    this.choices = turn.choices.map((data) => new Choice(row, data));
    this.foot = add(this.article, "div", "foot");
    addButton(this.foot, "Retry", retry);
    this.meta = add(this.foot, "p", "meta", turn.meta);
    if (this.choices.length > 1) this.addChoosers(choose);
    else this.foot.prepend(this.choices[0].actions);
    this.draw();
  }

  addChoosers(choose) {
    this.choosers = this.choices.map(({ actions }, i) =>
      addButton(actions, "Go on with this", () => {
        this.turn.chosen = i;
        this.markChosen();
        choose();
      }),
    );
    this.markChosen();
  }

  markChosen() {
    this.choosers.forEach((button, i) => button.setAttribute("aria-pressed", i === this.turn.chosen));
  }

  draw() {
    for (const choice of this.choices) choice.draw();
  }

  begin() {
    this.article.setAttribute("aria-busy", "true");
    this.began = performance.now();
    this.numTokens = null;
  }

  take(chunk) {
    this.numTokens = chunk.usage?.completion_tokens ?? this.numTokens;
    for (const { index, delta, logprobs, finish_reason: reason } of chunk.choices) {
      const { data } = this.choices[index];
      if (delta.content || delta.reasoning_content) this.firstAt ??= performance.now();
      data.content += delta.content ?? "";
      data.reasoning += delta.reasoning_content ?? "";
      data.tokens.push(...(logprobs?.content ?? []));
      data.finishReason = reason ?? data.finishReason;
    }
    this.drawing ??= requestAnimationFrame(() => this.drawNow());
  }

  drawNow() {
    cancelAnimationFrame(this.drawing);
    this.drawing = undefined;
    this.draw();
  }

  /** Notes below the answer how it ended and how fast it was. */
  end(note) {
    this.drawNow();
    this.article.removeAttribute("aria-busy");
    const isCut = this.turn.choices.some((data) => data.finishReason === "length");
    const notes = [note || (isCut ? "cut at the most tokens" : "")];
    if (this.numTokens !== null) notes.push(`${this.numTokens} tokens`);
    if (this.firstAt) {
      const seconds = (performance.now() - this.firstAt) / 1000;
      notes.push(`first after ${Math.round(this.firstAt - this.began)} ms`);
      if (this.numTokens > 1 && seconds >= LEAST_SECONDS) notes.push(`${format((this.numTokens - 1) / seconds)} tokens/s`);
    }
    this.turn.meta = this.meta.textContent = notes.filter(Boolean).join(" · ");
  }
}
