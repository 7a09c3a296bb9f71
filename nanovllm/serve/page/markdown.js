// Markdown as DOM nodes: blocks, which begin at lines, and what is inside of a line. There is no HTML in it.

import { add, addCopyButton, make } from "./dom.js";

const MOST_DEPTH = 8;
const ITEM = /^( *)([-*+]|\d{1,9}[.)]) (.*)$/;
const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^(#{1,6}) (.*)$/;
const RULE = /^ {0,3}([-*_])( *\1){2,}$/;
const QUOTE = /^ {0,3}> ?/;
const ADDRESS = /^(https?:\/\/|mailto:)/i;

// Bounded, so that the time for a text stays proportional to its length.
const INLINE = new RegExp(
  [
    /\\(?<escaped>[!-/:-@[-`{-~])/,
    /(?<!`)(?<ticks>`{1,2})(?!`)(?<code>.{1,2000}?)(?<!`)\k<ticks>(?!`)/,
    /\*\*(?=\S)(?<strong>.{1,2000}?)(?<=\S)\*\*(?!\*)/,
    /~~(?=\S)(?<gone>.{1,2000}?)~~/,
    /\*(?=[^\s*])(?<em>[^*]{1,2000})(?<=\S)\*/,
    /(?<![\p{L}\p{N}_])_(?=[^\s_])(?<em2>[^_]{1,2000})(?<=\S)_(?![\p{L}\p{N}_])/,
    /!?\[(?<label>[^[\]]{1,1000})\]\((?<address>[^\s()]{1,2000}(?:\([^\s()]{0,200}\)[^\s()]{0,200})?)(?: "[^"]{0,500}")?\)/,
    /(?<bare>https?:\/\/[^\s<>"'`()[\]*]{0,2000}[^\s<>"'`()[\]*.,;:!?])/,
  ]
    .map((part) => part.source)
    .join("|"),
  "gsu",
);

/** Adds what is inside of a line. */
function addInline(parent, text) {
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    parent.append(text.slice(end, match.index), inlineNode(match));
    end = match.index + match[0].length;
  }
  parent.append(text.slice(end));
}

function inlineNode(match) {
  const { escaped, code, strong, gone, em, em2, label, address, bare } = match.groups;
  if (escaped) return escaped;
  if (code) return make("code", "", code);
  if (bare) return linkNode(bare, bare);
  if (label) return ADDRESS.test(address) ? linkNode(label, address) : match[0];
  const node = make(strong ? "strong" : gone ? "del" : "em");
  addInline(node, strong ?? gone ?? em ?? em2);
  return node;
}

function linkNode(label, address) {
  const node = make("a", "", label);
  node.href = address;
  node.target = "_blank";
  node.rel = "noopener noreferrer";
  return node;
}

/** Returns code with a button to copy it. */
export function codeNode(text, language) {
  const node = make("div", "code");
  const head = add(node, "div", "head");
  add(head, "span", "", language);
  addCopyButton(head, () => text);
  const pre = add(node, "pre");
  pre.tabIndex = 0;
  add(pre, "code", "", text);
  return node;
}

const closes = (fence, line) => line.trim().startsWith(fence) && !line.trim().replaceAll(fence[0], "");

function fenceEnd(lines, start) {
  const [, fence] = FENCE.exec(lines[start]);
  const end = lines.findIndex((line, i) => i > start && closes(fence, line));
  return end < 0 ? lines.length : end + 1;
}

function fenceNode(lines) {
  const [, fence, language] = FENCE.exec(lines[0]);
  const isClosed = lines.length > 1 && closes(fence, lines.at(-1));
  return codeNode(lines.slice(1, isClosed ? -1 : undefined).join("\n"), language.trim());
}

function headingNode([line]) {
  const [, marks, text] = HEADING.exec(line);
  // The page has the first heading.
  const node = make(`h${Math.min(marks.length + 1, 6)}`);
  addInline(node, text.trim());
  return node;
}

function quoteNode(lines, depth) {
  const node = make("blockquote");
  addBlocks(node, lines.map((line) => line.replace(QUOTE, "")), depth + 1);
  return node;
}

const isOrdered = (line) => /^ *\d/.test(line);

function listEnd(lines, start) {
  let end = start + 1;
  for (let i = start + 1; i < lines.length; i += 1) {
    if (!lines[i].trim()) continue;
    const isItem = ITEM.test(lines[i]) && isOrdered(lines[i]) === isOrdered(lines[start]);
    const isFurther = i === end && kindAt(lines, i) === PARAGRAPH;
    if (!isItem && !isFurther && !lines[i].startsWith("  ")) break;
    end = i + 1;
  }
  return end;
}

function listNode(lines, depth) {
  const [, indent, marker] = ITEM.exec(lines[0]);
  const node = make(isOrdered(lines[0]) ? "ol" : "ul");
  if (isOrdered(lines[0])) node.start = parseInt(marker, 10);
  const items = [];
  for (const line of lines) {
    const [, spaces, own, text] = ITEM.exec(line) ?? [];
    if (own && spaces.length <= indent.length + 1) items.push({ width: spaces.length + own.length + 1, lines: [text] });
    // Some write what belongs to an item with less before it than Markdown asks for.
    else items.at(-1).lines.push(line.slice(Math.min(line.search(/\S|$/), items.at(-1).width)));
  }
  for (const item of items) addBlocks(add(node, "li"), item.lines, depth + 1);
  return node;
}

const cells = (line) => line.trim().replace(/^\||(?<!\\)\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim());

function startsTable(lines, i) {
  const isRule = (line) => line.includes("|") && cells(line).every((cell) => /^:?-+:?$/.test(cell));
  return lines[i].includes("|") && i + 1 < lines.length && isRule(lines[i + 1]);
}

function tableNode(lines) {
  const box = make("div", "table");
  const table = add(box, "table");
  const aligns = cells(lines[1]).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : ""));
  lines.forEach((line, i) => {
    if (i === 1) return;
    const row = add(table, "tr");
    aligns.forEach((align, j) => addInline(add(row, i ? "td" : "th", align), cells(line)[j] ?? ""));
  });
  return box;
}

function paragraphNode(lines) {
  const node = make("p");
  addInline(node, lines.join("\n"));
  return node;
}

const whileLine = (isPart) => (lines, start) => {
  const length = lines.slice(start + 1).findIndex((line, i) => !isPart(line, lines, start + 1 + i));
  return length < 0 ? lines.length : start + 1 + length;
};
const oneLine = (_, start) => start + 1;

const PARAGRAPH = {
  end: whileLine((line, lines, i) => line.trim() && kindAt(lines, i) === PARAGRAPH),
  build: paragraphNode,
};
const KINDS = [
  { starts: (lines, i) => FENCE.test(lines[i]), end: fenceEnd, build: fenceNode },
  { starts: (lines, i) => HEADING.test(lines[i]), end: oneLine, build: headingNode },
  { starts: (lines, i) => RULE.test(lines[i]), end: oneLine, build: () => make("hr") },
  { starts: (lines, i) => QUOTE.test(lines[i]), end: whileLine((line) => QUOTE.test(line)), build: quoteNode },
  { starts: (lines, i) => ITEM.test(lines[i]), end: listEnd, build: listNode },
  { starts: startsTable, end: whileLine((line) => line.includes("|")), build: tableNode },
];

const kindAt = (lines, i) => KINDS.find(({ starts }) => starts(lines, i)) ?? PARAGRAPH;

function* blocks(lines) {
  for (let i = 0; i < lines.length; ) {
    const kind = kindAt(lines, i);
    const end = lines[i].trim() ? kind.end(lines, i) : i + 1;
    if (lines[i].trim()) yield { build: kind.build, lines: lines.slice(i, end) };
    i = end;
  }
}

function addBlocks(parent, lines, depth) {
  if (depth > MOST_DEPTH) parent.append(paragraphNode(lines));
  else for (const block of blocks(lines)) parent.append(block.build(block.lines, depth));
}

const sources = new WeakMap();

/** Shows a text that grows: blocks that are as they were stay, with what the reader has selected. */
export function showMarkdown(parent, text) {
  let count = 0;
  for (const { build, lines } of blocks(text.replaceAll("\r\n", "\n").split("\n"))) {
    const old = parent.children[count];
    const source = lines.join("\n");
    count += 1;
    if (old && sources.get(old) === source) continue;
    const node = build(lines, 0);
    sources.set(node, source);
    if (old) old.replaceWith(node);
    else parent.append(node);
  }
  while (parent.children.length > count) parent.lastElementChild.remove();
}
