// Shares of a score as heat over a picture. The colours are cooc/heatmaps.py's ramp, at every 17th of its 256 steps.

export const RAMP = [
  [12, 9, 33], [30, 14, 55], [54, 16, 73], [81, 15, 86],
  [112, 8, 92], [145, 0, 90], [171, 7, 83], [193, 37, 73],
  [214, 61, 60], [231, 85, 41], [245, 112, 12], [250, 142, 24],
  [252, 170, 53], [252, 197, 87], [252, 223, 122], [252, 247, 158],
];

const ENLARGED = 24; // pixels for one cell

function colour(value) {
  const at = Math.min(Math.max(value, 0), 1) * (RAMP.length - 1);
  const low = Math.floor(at);
  const high = Math.min(low + 1, RAMP.length - 1);
  return [0, 1, 2].map((i) => RAMP[low][i] + (RAMP[high][i] - RAMP[low][i]) * (at - low));
}

export function drawRamp(canvas) {
  const context = canvas.getContext("2d");
  for (let x = 0; x < canvas.width; x++) {
    context.fillStyle = `rgb(${colour(x / (canvas.width - 1)).map(Math.round)})`;
    context.fillRect(x, 0, 1, 1);
  }
}

// The map over the part `box` of a picture of width x height full-size pixels. Its last cells may reach beyond that.
export function heatOver({ map, region }, box, width, height) {
  const clip = document.createElement("div");
  clip.className = "clip";
  const [left, top, right, bottom] = box;
  const inside = region.map((n, i) => n - (i % 2 ? top : left));
  clip.append(place(heatCanvas(map), inside, right - left, bottom - top));
  return place(clip, box, width, height);
}

// One pixel for each cell, then enlarged smoothly: as it is, the browser would show the cells.
function heatCanvas(map) {
  const cells = new OffscreenCanvas(map[0].length, map.length);
  const most = Math.max(...map.map((row) => Math.max(...row)), 1e-12);
  const pixels = new ImageData(cells.width, cells.height);
  map.flat().forEach((share, i) => {
    const value = Math.max(share / most, 0);
    pixels.data.set([...colour(0.3 + 0.7 * value), 205 * Math.min(1, 1.5 * value)], 4 * i);
  });
  cells.getContext("2d").putImageData(pixels, 0, 0);
  const canvas = document.createElement("canvas");
  canvas.width = ENLARGED * cells.width;
  canvas.height = ENLARGED * cells.height;
  const context = canvas.getContext("2d");
  context.imageSmoothingQuality = "high";
  context.drawImage(cells, 0, 0, canvas.width, canvas.height);
  return canvas;
}

// Put something over a picture of width x height full-size pixels, at a box of them.
export function place(element, [x0, y0, x1, y1], width, height) {
  Object.assign(element.style, {
    left: `${(100 * x0) / width}%`,
    top: `${(100 * y0) / height}%`,
    width: `${(100 * (x1 - x0)) / width}%`,
    height: `${(100 * (y1 - y0)) / height}%`,
  });
  return element;
}
