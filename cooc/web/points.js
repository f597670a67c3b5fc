// Points in which two pictures agree, and the region around them, as SVG over each; lines between them over both.

const NAME = "http://www.w3.org/2000/svg";
const LINES = 60; // more hide the pictures

function shape(kind, attributes) {
  const element = document.createElementNS(NAME, kind);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

const colour = (i) => `hsl(${(i * 222.5) % 360} 90% 62%)`; // neighbours differ

// points: [[x, y], ...] in pixels of a full-size picture, as region and size are.
export function pointsOver(points, { region, size: [width, height] }) {
  const svg = shape("svg", { class: "points", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" });
  svg.append(shape("polygon", { points: region.map((corner) => corner.join()).join(" ") }));
  const radius = Math.max(width, height) / 150;
  svg.append(...points.map(([cx, cy], i) => shape("circle", { cx, cy, r: radius, fill: colour(i) })));
  return svg;
}

// points: [[x, y in the left picture, x, y in the right one], ...]
export function drawLines(svg, left, right, points, agreement) {
  svg.replaceChildren();
  if (!points.length) return;
  const [all, a, b] = [svg, left, right].map((element) => element.getBoundingClientRect());
  svg.setAttribute("viewBox", `0 0 ${all.width} ${all.height}`);
  const at = (box, x, y, [width, height]) => [box.left - all.left + (x / width) * box.width, box.top - all.top + (y / height) * box.height];
  const step = Math.ceil(points.length / LINES);
  points.forEach(([x, y, u, v], i) => {
    if (i % step) return;
    const [x1, y1] = at(a, x, y, agreement.query.size);
    const [x2, y2] = at(b, u, v, agreement.picture.size);
    svg.append(shape("line", { x1, y1, x2, y2, stroke: colour(i) }));
  });
}
