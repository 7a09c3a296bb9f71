// The cache's blocks as a grid, while it is open.

import { call } from "./api.js";
import { element } from "./dom.js";
import { isWide, whenPolled } from "./state.js";

const POLL_MS = 1000;
const LIT_POLLS = 4;
const HEIGHT = 160;
const SIZES = { least: 3, most: 14 };

const canvas = element("grid");
let usage = null;
let isPolling = false;
let nextPoll = 0;
/** For how many polls a cell's last hit is still shown. */
let lit = [];

function take(latest) {
  const isSame = usage?.hits.length === latest.hits.length;
  lit = latest.hits.map((hits, i) => (isSame && hits > usage.hits[i] ? LIT_POLLS : Math.max(0, (lit[i] ?? 0) - 1)));
  usage = latest;
}

const numIn = (i) => Math.min(usage.blocks_per_cell, usage.num_blocks - i * usage.blocks_per_cell);
const sum = (values) => values.reduce((total, value) => total + value, 0);

function geometry() {
  const { clientWidth: width } = canvas;
  const count = usage.used.length;
  const size = Math.max(SIZES.least, Math.min(SIZES.most, Math.floor(Math.sqrt((width * HEIGHT) / count))));
  const columns = Math.floor(width / size);
  return { width, size, columns, height: Math.ceil(count / columns) * size };
}

function draw() {
  const { width, size, columns, height } = geometry();
  canvas.style.height = `${height}px`;
  canvas.width = width * devicePixelRatio;
  canvas.height = height * devicePixelRatio;
  const context = canvas.getContext("2d");
  context.scale(devicePixelRatio, devicePixelRatio);
  const style = getComputedStyle(canvas);
  for (let i = 0; i < usage.used.length; i += 1) {
    for (const [name, share] of layers(i)) {
      context.fillStyle = style.getPropertyValue(`--${name}`);
      context.globalAlpha = share;
      context.fillRect((i % columns) * size, Math.floor(i / columns) * size, size - 1, size - 1);
    }
  }
}

/** Returns the colours of a cell, each with how much it covers those before it. */
function layers(i) {
  // One block among many is to be seen.
  const cover = (count) => (count ? 0.4 + (0.6 * count) / numIn(i) : 0);
  return [
    ["line", 1],
    ["cached", cover(usage.cached[i])],
    ["first", cover(usage.used[i])],
    ["hit", lit[i] / LIT_POLLS],
  ];
}

function showCounts() {
  const used = sum(usage.used);
  const values = { used, cached: sum(usage.cached), free: usage.num_blocks - used, hits: sum(usage.hits) };
  for (const [name, value] of Object.entries(values)) element(`num-${name}`).textContent = value.toLocaleString("en");
  const cell = usage.blocks_per_cell > 1 ? `, ${usage.blocks_per_cell} in a cell` : "";
  element("grid-note").textContent = `Blocks of ${usage.block_size} tokens${cell}`;
}

function describe(event) {
  if (!usage) return;
  const { size, columns } = geometry();
  const i = Math.floor(event.offsetY / size) * columns + Math.floor(event.offsetX / size);
  const first = i * usage.blocks_per_cell;
  const names = usage.blocks_per_cell > 1 ? `Blocks ${first} to ${first + numIn(i) - 1}` : `Block ${first}`;
  const facts = [
    usage.used[i] ? `${usage.users[i]} sequences use ${usage.blocks_per_cell > 1 ? "one" : "it"}` : "free",
    usage.cached[i] ? "in the prefix cache" : "",
    usage.hits[i] ? `found ${usage.hits[i]} times` : "",
  ];
  canvas.title = i < usage.used.length ? `${names}: ${facts.filter(Boolean).join(", ")}` : "";
}

async function poll() {
  if (isPolling || !element("cache").open || performance.now() < nextPoll) return;
  isPolling = true;
  try {
    const response = await call("stats/blocks");
    take(await response.json());
    showCounts();
    draw();
  } catch (error) {
    element("grid-note").textContent = error.message;
  }
  isPolling = false;
  nextPoll = performance.now() + POLL_MS;
}

element("cache").open = isWide;
element("cache").addEventListener("toggle", poll);
canvas.addEventListener("pointermove", describe);
whenPolled(poll);
