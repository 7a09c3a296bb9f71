// The engine's state: its numbers now, and plots of its last minute.

import { apiKey, call } from "./api.js";
import { element } from "./dom.js";

const POLL_MS = 500;
const RETRY_MS = 3000;
const TIMEOUT_MS = 5000;
const WINDOW_SECONDS = 60;

const samples = [];
let isPolling = false;
let listener = null;
let pauseUntil = 0;

const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
const percent = new Intl.NumberFormat("en", { style: "percent", maximumFractionDigits: 1 });

export const format = (value) => compact.format(value);

/** Whether the state stands beside the chat. */
export const isWide = matchMedia("(min-width: 56rem)").matches;

/** Has a function called whenever the state is new. */
export const whenPolled = (call) => (listener = call);

/** Returns the model's name in the API, undefined until it is known. */
export const modelName = () => samples.at(-1)?.model;

/** Adds a sample of the counters, with the rates since the one before it. */
function addSample(sample) {
  const last = samples.at(-1);
  // A server that has begun anew counts from zero.
  if (last && (sample.time < last.time || sample.num_output_tokens < last.num_output_tokens)) samples.length = 0;
  const { time, num_prompt_tokens: prompt, num_output_tokens: output } = samples.at(-1) ?? sample;
  const seconds = sample.time - time || 1;
  sample.prompt_rate = (sample.num_prompt_tokens - prompt) / seconds;
  sample.output_rate = (sample.num_output_tokens - output) / seconds;
  samples.push(sample);
  // One sample older than the window, so that lines begin at its edge.
  while (samples.length > 2 && samples[1].time < sample.time - WINDOW_SECONDS) samples.shift();
}

function show() {
  const sample = samples.at(-1);
  element("model").textContent = [sample.model, sample.device].filter(Boolean).join(" · ");
  for (const node of document.querySelectorAll("[data-value]")) {
    const name = node.dataset.value;
    node.textContent = (name === "cache_use" ? percent : compact).format(sample[name]);
  }
  for (const canvas of document.querySelectorAll("[data-series]")) drawPlot(canvas);
}

/** Returns the least of 1, 2, 5, 10, 20, 50 ... that is no less than a value. */
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1)));
  return [1, 2, 5, 10].map((step) => step * power).find((top) => top >= value);
}

function drawPlot(canvas) {
  const names = canvas.dataset.series.split(" ");
  const values = names.flatMap((name) => samples.map((sample) => sample[name]));
  const top = Number(canvas.dataset.top) || roundUp(Math.max(...values));
  const { clientWidth: width, clientHeight: height } = canvas;
  const style = getComputedStyle(canvas);
  const color = (name) => style.getPropertyValue(`--${name}`);
  // This also clears it.
  canvas.width = width * devicePixelRatio;
  canvas.height = height * devicePixelRatio;
  const context = canvas.getContext("2d");
  context.scale(devicePixelRatio, devicePixelRatio);
  context.fillStyle = color("line");
  context.fillRect(0, height - 1, width, 1);
  context.fillRect(0, 0, width, 1);
  names.forEach((name, i) => {
    drawLine(context, linePoints(name, top, width, height - 3), color(i ? "second" : "first"), height);
  });
  context.fillStyle = color("muted");
  context.font = `10px ${style.fontFamily}`;
  context.fillText(canvas.dataset.top ? percent.format(top) : compact.format(top), 2, 11);
}

/** Returns a series as points: now at the right edge, `top` at the upper one. */
function linePoints(name, top, width, height) {
  const now = samples.at(-1).time;
  return samples.map((sample) => [
    width * (1 - (now - sample.time) / WINDOW_SECONDS),
    1 + height * (1 - sample[name] / top),
  ]);
}

function drawLine(context, points, color, bottom) {
  const line = new Path2D();
  for (const [x, y] of points) line.lineTo(x, y);
  const area = new Path2D(line);
  area.lineTo(points.at(-1)[0], bottom);
  area.lineTo(points[0][0], bottom);
  context.fillStyle = context.strokeStyle = color;
  context.lineWidth = 1.5;
  context.globalAlpha = 0.15;
  context.fill(area);
  context.globalAlpha = 1;
  context.stroke(line);
}

function setStatus(text, isLive) {
  const status = element("status");
  // Readers of the screen hear every change.
  if (status.textContent !== text) status.textContent = text;
  status.classList.toggle("live", isLive);
}

async function poll() {
  if (isPolling || document.hidden || performance.now() < pauseUntil) return;
  isPolling = true;
  const key = apiKey();
  try {
    const response = await call("stats", { signal: AbortSignal.timeout(TIMEOUT_MS) });
    addSample(await response.json());
    setStatus("live", true);
    show();
    listener();
  } catch (error) {
    const isRefused = error.status === 401;
    setStatus(isRefused ? "needs an API key" : error.message, false);
    if (isRefused) element("settings").open = true;
    // Only another key can help.
    pauseUntil = isRefused && key === apiKey() ? Infinity : performance.now() + RETRY_MS;
  }
  isPolling = false;
}

element("settings").open = isWide;
element("key").addEventListener("change", () => {
  pauseUntil = 0;
});
setInterval(poll, POLL_MS);
poll();
