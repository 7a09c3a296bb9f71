// The settings, and what they make of a request.

import { element } from "./dom.js";
import { load, save } from "./storage.js";

const FIELDS = ["temperature", "max_tokens", "n", "system", "schema", "show_probabilities"].map(element);
const NUM_ALTERNATIVES = 5;

const valueOf = (field) => (field.type === "checkbox" ? field.checked : field.value);

/** Whether tokens are coloured by their probability. */
export const showsProbabilities = () => element("show_probabilities").checked;

/** Opens the settings and says what is wrong with them; returns whether all is right. */
export function checkSettings() {
  if (element("fields").checkValidity()) return true;
  element("settings").open = true;
  element("fields").reportValidity();
  return false;
}

function checkSchema() {
  const field = element("schema");
  field.setCustomValidity("");
  try {
    if (field.value.trim()) JSON.parse(field.value);
  } catch (error) {
    field.setCustomValidity(`This is not JSON: ${error.message}`);
  }
}

/** Returns the fields of a request; what is not set is the server's business. */
export function requestFields() {
  const number = (id) => (element(id).value === "" ? undefined : element(id).valueAsNumber);
  const schema = element("schema").value.trim();
  const format = { type: "json_schema", json_schema: { name: "answer", schema: schema && JSON.parse(schema) } };
  return {
    temperature: number("temperature"),
    max_tokens: number("max_tokens"),
    n: number("n"),
    response_format: schema ? format : undefined,
    logprobs: showsProbabilities() || undefined,
    top_logprobs: showsProbabilities() ? NUM_ALTERNATIVES : undefined,
  };
}

/** Returns the messages before the conversation. */
export function systemMessages() {
  const content = element("system").value.trim();
  return content ? [{ role: "system", content }] : [];
}

const kept = load("settings", {});
for (const field of FIELDS) {
  if (field.type === "checkbox") field.checked = kept[field.id] ?? false;
  else field.value = kept[field.id] ?? "";
}
checkSchema();
element("schema").addEventListener("input", checkSchema);
element("fields").addEventListener("submit", (event) => event.preventDefault());
element("fields").addEventListener("input", () => {
  save("settings", Object.fromEntries(FIELDS.map((field) => [field.id, valueOf(field)])));
});
