// A picture as the model takes it: decoded as `opal-deploy infer` does it, cropped, and resized with Pillow's arithmetic.

/** Pillow's filters: how far each reaches, and its value at a distance. */
const FILTERS = {
  bilinear: [1, (x) => x < 1 ? 1 - x : 0],
  bicubic: [2, (x) => x < 1 ? (1.5 * x - 2.5) * x * x + 1 : x < 2 ? (((x - 5) * x + 8) * x - 4) * -0.5 : 0],
};

/** Pillow's weights for one side, as integers of 22 bits: [first pixel, weights] for each of `out` pixels. */
function findWeights(size, out, filter) {
  const [reach, value] = FILTERS[filter], scale = size / out, filterScale = Math.max(scale, 1), support = reach * filterScale;
  return Array.from({ length: out }, (_, i) => {
    const center = (i + 0.5) * scale;
    const first = Math.max(Math.trunc(center - support + 0.5), 0);
    const last = Math.min(Math.trunc(center + support + 0.5), size);
    const weights = Array.from({ length: last - first }, (_, x) =>
      value(Math.abs((x + first - center + 0.5) * (1 / filterScale))));
    const sum = weights.reduce((total, weight) => total + weight, 0);
    return [first, Int32Array.from(weights, (weight) =>
      Math.trunc((weight / sum < 0 ? -0.5 : 0.5) + (sum ? weight / sum : 0) * (1 << 22)))];
  });
}

/** Resize the rows, or the columns, of RGB pixels of w x h to a length of `out`. */
function resizeSide(pixels, w, h, out, isRow, filter) {
  const [newW, newH] = isRow ? [out, h] : [w, out], step = isRow ? 3 : w * 3, half = 1 << 21;
  const resized = new Uint8ClampedArray(newW * newH * 3);
  findWeights(isRow ? w : h, out, filter).forEach(([first, weights], i) => {
    for (let other = 0; other < (isRow ? h : w); other++) {
      const start = isRow ? (other * w + first) * 3 : (first * w + other) * 3;
      const to = isRow ? (other * out + i) * 3 : (i * w + other) * 3;
      for (let channel = 0; channel < 3; channel++) {
        let sum = half, from = start + channel;
        for (const weight of weights) { sum += pixels[from] * weight; from += step; }
        resized[to + channel] = sum >> 22;
      }
    }
  });
  return resized;
}

/** Antialiased, with the arithmetic of Pillow 13: RGB pixels of w x h to outW x outH. A canvas' differs. */
export function resize(pixels, w, h, outW, outH, filter = "bilinear") {
  const rows = (from, height) => w === outW ? from : resizeSide(from, w, height, outW, true, filter);
  const columns = (from, width) => h === outH ? from : resizeSide(from, width, h, outH, false, filter);
  // Pillow's order, which changes what is rounded
  const columnsFirst = h > outH && h - outH > (w - outW) * 2;
  return columnsFirst ? rows(columns(pixels, w), outH) : columns(rows(pixels, h), outW);
}

/**
 * Return a JPEG's or PNG's bytes without its colour profile, which WebKit applies even when asked not to. Other and
 * truncated files stay as they are.
 */
function withoutProfile(bytes) {
  const view = new DataView(bytes), text = (at, length) => String.fromCharCode(...new Uint8Array(bytes, at, length));
  const isJpeg = view.byteLength > 4 && view.getUint16(0) === 0xffd8;
  if (!isJpeg && !(view.byteLength > 8 && text(1, 3) === "PNG")) return [bytes];
  const kept = [];
  let at = isJpeg ? 2 : 8, from = 0;
  while (at + 16 <= view.byteLength) {
    const size = isJpeg ? 2 + view.getUint16(at + 2) : 12 + view.getUint32(at);
    const isProfile = isJpeg ? view.getUint16(at) === 0xffe2 && text(at + 4, 11) === "ICC_PROFILE" : text(at + 4, 4) === "iCCP";
    if (isJpeg ? view.getUint8(at) !== 0xff || view.getUint16(at) === 0xffda : text(at + 4, 4) === "IDAT") break;
    if (isProfile) {
      kept.push(bytes.slice(from, at));
      from = at + size;
    }
    at += size;
  }
  return from > view.byteLength ? [bytes] : [...kept, bytes.slice(from)];
}

/** Decode a file: upright, colour profiles not applied, transparency over white, as `infer` does. */
export async function decode(bytes, type) {
  const bitmap = await createImageBitmap(new Blob(withoutProfile(bytes), { type }), {
    imageOrientation: "from-image", colorSpaceConversion: "none", premultiplyAlpha: "none",
  });
  const canvas = new OffscreenCanvas(bitmap.width, bitmap.height);
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.fillStyle = "#fff";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0);
  bitmap.close();
  return context;
}

/** As Python rounds: halves to the even neighbour. */
const round = (value) => Math.abs(value % 1) === 0.5 ? 2 * Math.round(value / 2) : Math.round(value);

/**
 * What a resize rule, such as shortest_edge-256-bilinear, makes of a part of a picture: its filter, the new size, the
 * corner where the input begins, and the part of the picture [x0, y0, x1, y1] that the input shows. As `ResizeRule.fit`
 * of artifact/preprocessing.py and `fit_input` of preprocess/resize.py.
 */
export function fit([x0, y0, x1, y1], { width, height, rule = "squash-bilinear" }) {
  const [kind, short, filter = short] = rule.split("-"), w = x1 - x0, h = y1 - y0, isBarred = kind === "letterbox";
  if (kind === "squash") return { filter, size: [width, height], corner: [0, 0], shown: [x0, y0, x1, y1] };
  let size, corner;
  if (isBarred) {
    const scale = Math.min(width / w, height / h);
    size = [Math.max(1, round(w * scale)), Math.max(1, round(h * scale))];
    corner = [-Math.floor((width - size[0]) / 2), -Math.floor((height - size[1]) / 2)];
  } else {
    const longer = Math.trunc(short * Math.max(w, h) / Math.min(w, h));
    size = w <= h ? [Number(short), longer] : [longer, Number(short)];
    corner = [round((size[0] - width) / 2), round((size[1] - height) / 2)];
  }
  const [left, top] = corner, across = w / size[0], down = h / size[1];
  const shown = [round(x0 + left * across), round(y0 + top * down), round(x0 + (left + width) * across), round(y0 + (top + height) * down)];
  if (isBarred) return { filter, size, corner, fill: 114, shown };
  return { filter, size, corner, shown: [Math.max(x0, shown[0]), Math.max(y0, shown[1]), Math.min(x1, shown[2]), Math.min(y1, shown[3])] };
}

/** The model's input of a form {width, height, rule}: RGB pixels of a crop [x0, y0, x1, y1], resized. */
export function toInput(context, crop, form) {
  const [x0, y0, x1, y1] = crop, { width, height } = form;
  const { filter, size: [newW, newH], corner: [left, top], fill = 0 } = fit(crop, form);
  const { data, width: w, height: h } = context.getImageData(x0, y0, x1 - x0, y1 - y0);
  const pixels = new Uint8Array(w * h * 3);
  for (let i = 0, j = 0; i < pixels.length; i += 3, j += 4) {
    pixels[i] = data[j];
    pixels[i + 1] = data[j + 1];
    pixels[i + 2] = data[j + 2];
  }
  const resized = resize(pixels, w, h, newW, newH, filter);
  if (newW === width && newH === height) return resized;
  // bars where the input is larger
  const input = new Uint8ClampedArray(width * height * 3).fill(fill), [from, to] = [Math.max(left, 0), Math.min(left + width, newW)];
  for (let row = Math.max(-top, 0); row < Math.min(height, newH - top); row++) {
    const start = (row + top) * newW;
    input.set(resized.subarray(3 * (start + from), 3 * (start + to)), 3 * (row * width + from - left));
  }
  return input;
}

/** Cover parts of a picture, in its pixels: {circle: [x, y, radius]} or {rect: [x0, y0, x1, y1]}. */
export function cover(context, marks) {
  context.fillStyle = "rgb(127, 127, 127)";
  for (const { circle, rect } of marks) {
    context.beginPath();
    if (circle) context.arc(...circle, 0, 2 * Math.PI);
    else context.rect(rect[0], rect[1], rect[2] - rect[0], rect[3] - rect[1]);
    context.fill();
  }
}

/** The SHA-256 in hex; null where the browser has none: it has it on https and on this machine only. */
export async function digest(bytes) {
  if (!crypto.subtle) return null;
  const hash = await crypto.subtle.digest("SHA-256", bytes);
  return Array.from(new Uint8Array(hash), (byte) => byte.toString(16).padStart(2, "0")).join("");
}
