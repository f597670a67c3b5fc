// The OpenAPI schema for people, without any script from elsewhere.

const schema = await (await fetch("api/v1/openapi.json")).json();
const element = (tag, text, ...children) => {
  const made = document.createElement(tag);
  made.textContent = text;
  made.append(...children);
  return made;
};
const resolve = (value) => (value?.$ref ? schema.components.schemas[value.$ref.split("/").pop()] : value);

function kind(given) {
  const value = resolve(given);
  if (value.anyOf) return value.anyOf.map(kind).join(" or ");
  if (value.enum) return value.enum.join(" / ");
  if (value.type === "array" && value.items) return `list of ${kind(value.items)}`;
  return value.contentMediaType || value.format === "binary" ? "file" : value.title && value.properties ? value.title : value.type ?? "";
}

function table(rows) {
  const body = rows.map(([name, where, value]) =>
    element("tr", "", element("td", "", element("code", name)), element("td", where), element("td", kind(value)), element("td", value.description ?? "")));
  return element("table", "", ...body);
}

document.getElementById("about").textContent = schema.info.description;
for (const [path, methods] of Object.entries(schema.paths)) {
  for (const [method, route] of Object.entries(methods)) {
    const rows = (route.parameters ?? []).map((one) => [one.name, one.in, { ...one.schema, description: one.description ?? one.schema.description }]);
    for (const { schema: body } of Object.values(route.requestBody?.content ?? {})) {
      rows.push(...Object.entries(resolve(body).properties).map(([name, value]) => [name, "body", value]));
    }
    const answer = Object.entries(route.responses).find(([code]) => code < "300");
    const shape = resolve(answer?.[1].content?.["application/json"]?.schema);
    if (shape?.properties) rows.push(...Object.entries(shape.properties).map(([name, value]) => [name, "answer", value]));
    document.getElementById("routes").append(
      element("h2", "", element("code", `${method.toUpperCase()} ${path}`)),
      element("p", route.description ?? ""),
      table(rows),
    );
  }
}
