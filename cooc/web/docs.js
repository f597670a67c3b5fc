// The REST API, to read and to try: Swagger UI over our schema. Its files come with a package, nothing from elsewhere.
// A token is asked for by the page itself: whoever has logged in there has a session here.

SwaggerUIBundle({
  url: "api/v1/openapi.json",
  dom_id: "#docs",
  deepLinking: true,
  tagsSorter: (a, b) => a.localeCompare(b),
  validatorUrl: null, // else it asks another server what it thinks of our schema
});
