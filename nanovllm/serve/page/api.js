// The server's API.

import { element } from "./dom.js";
import { load, save } from "./storage.js";

const keyField = element("key");

export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** Returns the key that requests are sent with; it is kept until the browser's tab is closed. */
export const apiKey = () => keyField.value.trim();

/** Returns what the server says is wrong; a proxy before it may answer with something other than its JSON. */
async function errorMessage(response) {
  const text = await response.text();
  const isJson = response.headers.get("Content-Type")?.startsWith("application/json");
  const message = isJson ? JSON.parse(text).error?.message : undefined;
  return message ?? `${response.status} ${response.statusText} ${text.slice(0, 200)}`;
}

/** Sends a request with the key; throws an ApiError unless it is answered with a success. */
export async function call(path, options = {}) {
  const headers = new Headers({ "Content-Type": "application/json" });
  if (apiKey()) headers.set("Authorization", `Bearer ${apiKey()}`);
  const response = await fetch(path, { ...options, headers }).catch((error) => {
    throw error instanceof TypeError ? new ApiError("The server cannot be reached.") : error;
  });
  if (!response.ok) throw new ApiError(await errorMessage(response), response.status);
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

/** Passes the chunks of an answer on until it is complete. */
export async function streamAnswer(body, signal, take) {
  const response = await call("v1/chat/completions", { method: "POST", body: JSON.stringify(body), signal });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.message, chunk.error.code);
    take(chunk);
  }
  throw new ApiError("The answer broke off.");
}

keyField.value = load("key", "");
keyField.addEventListener("input", () => save("key", apiKey()));
