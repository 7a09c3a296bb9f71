// The API's reference, made of its description.

import { add, element } from "./dom.js";

let components = {};

const follow = (schema) => (schema.$ref ? components[schema.$ref.split("/").at(-1)] : schema);

/** Returns the schemas that a value may have; null is left out, since every field that may be null may be missing. */
function variants(schema) {
  const all = schema.anyOf ?? schema.oneOf ?? schema.allOf ?? [schema];
  return all.flatMap((one) => (one.anyOf ?? one.oneOf ? variants(one) : [one])).filter((one) => one.type !== "null");
}

function typeName(schema) {
  const names = variants(schema).map((one) => {
    const values = one.enum ?? ("const" in one ? [one.const] : null);
    if (one.$ref) return follow(one).title ?? "object";
    if (values) return values.map((value) => JSON.stringify(value)).join(" | ");
    return one.type === "array" ? `[${one.items ? typeName(one.items) : "any"}]` : (one.type ?? "any");
  });
  return names.join(" or ");
}

/** Returns the objects with fields that a value may have in it. */
function objects(schema) {
  return variants(schema).flatMap((one) => {
    const target = follow(one);
    if (target.properties) return [target];
    if (target.items) return objects(target.items);
    return one.$ref && (target.anyOf ?? target.oneOf) ? objects(target) : [];
  });
}

/** Adds details that are made when they are first opened: a schema may hold itself. */
function addDetails(parent, className, fill) {
  const details = add(parent, "details", className);
  const isEmpty = () => details.children.length === 1;
  details.addEventListener("toggle", () => details.open && isEmpty() && fill(details));
  return add(details, "summary");
}

function addFields(parent, schema) {
  const { properties, required = [], description } = schema;
  if (description) add(parent, "p", "about", description);
  const list = add(parent, "ul", "schema");
  for (const [name, field] of Object.entries(properties)) {
    const item = add(list, "li");
    const inner = objects(field);
    const line = inner.length ? addDetails(item, "", (box) => inner.forEach((one) => addFields(box, one))) : item;
    add(line, "code", "", name);
    add(line, "span", "type", typeName(field) + (required.includes(name) ? ", required" : ""));
    if (field.description) add(line, "span", "about", field.description);
  }
}

function addPart(parent, title, content) {
  const schema = content?.["application/json"]?.schema;
  if (!schema) return;
  add(parent, "h2", "", title);
  const inner = objects(schema);
  for (const one of inner) addFields(parent, one);
  if (!inner.length) add(parent, "p", "about", typeName(schema));
}

function addOperation(path, method, operation) {
  const summary = addDetails(element("operations"), "operation", (box) => {
    addPart(box, "Body", operation.requestBody?.content);
    addPart(box, "Answer", operation.responses[200]?.content);
    add(box, "h2", "", "Status");
    const list = add(box, "ul", "schema");
    for (const [status, { description }] of Object.entries(operation.responses)) {
      const item = add(list, "li");
      add(item, "code", "", status);
      add(item, "span", "about", status === "200" ? "the answer" : description);
    }
  });
  add(summary, "b", "", method.toUpperCase());
  add(summary, "code", "", path);
  add(summary, "span", "about", operation.description);
}

const description = await (await fetch("openapi.json")).json();
components = description.components.schemas;
element("model").textContent = `version ${description.info.version}`;
for (const [path, operations] of Object.entries(description.paths)) {
  for (const [method, operation] of Object.entries(operations)) addOperation(path, method, operation);
}
