// Tokens coloured by their probability; the alternatives to the one that is pointed at.

import { add, element } from "./dom.js";

const percent = new Intl.NumberFormat("en", { style: "percent", maximumFractionDigits: 2 });
const box = element("alternatives");
const entries = new WeakMap();
let shown = null;

/** Adds those of the tokens that are not shown yet. */
export function showTokens(parent, tokens) {
  for (const token of tokens.slice(parent.children.length)) {
    const span = add(parent, "span", "token", token.token);
    // Set through the object model, since the page allows no styles in attributes.
    span.style.setProperty("--doubt", 1 - Math.exp(token.logprob));
    entries.set(span, token);
  }
}

function visible(text) {
  return text.replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥") || "(none)";
}

function showAlternatives(span) {
  const token = entries.get(span);
  const tops = token.top_logprobs;
  box.replaceChildren();
  for (const top of tops.some((other) => other.token === token.token) ? tops : [token, ...tops]) {
    const row = add(box, "div", top.token === token.token ? "own" : "");
    add(row, "code", "", visible(top.token));
    add(row, "meter").value = Math.exp(top.logprob);
    add(row, "span", "", percent.format(Math.exp(top.logprob)));
  }
  box.hidden = false;
  const at = span.getClientRects()[0];
  const isLow = at.bottom + box.offsetHeight + 8 > innerHeight;
  box.style.left = `${Math.max(8, Math.min(at.left, innerWidth - box.offsetWidth - 8))}px`;
  box.style.top = `${isLow ? at.top - box.offsetHeight - 4 : at.bottom + 4}px`;
}

function point(event) {
  const span = event.target.closest?.(".token") ?? null;
  if (span === shown) return;
  shown = span;
  if (span) showAlternatives(span);
  else box.hidden = true;
}

// Phones have nothing to hover with.
for (const kind of ["pointerover", "click"]) document.addEventListener(kind, point);
element("log").addEventListener("scroll", () => {
  shown = null;
  box.hidden = true;
});
