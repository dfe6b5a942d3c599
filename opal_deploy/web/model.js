// Answers and explains pictures with the exported graph, in this browser. The numbers are those of `opal-deploy infer`.
export const model = await (await fetch("model.json")).json();
export const labels = model.metadata.class_names;
const { grid: [rows, cols], input_size: [height, width] } = model.metadata;
const { epsilon } = model.metadata.head;
export const classMap = readClassMap(model.class_map);
let ort, session;

// ---- a picture as the model takes it ------------------------------------------------------------------------------

/** Pillow's weights for one side, as integers of 22 bits: [first pixel, weights] for each of `out` pixels. */
function bilinearWeights(size, out) {
  const scale = size / out, filterScale = Math.max(scale, 1), support = filterScale;
  return Array.from({ length: out }, (_, i) => {
    const center = (i + 0.5) * scale;
    const first = Math.max(Math.trunc(center - support + 0.5), 0);
    const last = Math.min(Math.trunc(center + support + 0.5), size);
    const weights = Array.from({ length: last - first }, (_, x) => {
      const distance = Math.abs((x + first - center + 0.5) * (1 / filterScale));
      return distance < 1 ? 1 - distance : 0;
    });
    const sum = weights.reduce((total, weight) => total + weight, 0);
    return [first, Int32Array.from(weights, (weight) => Math.trunc(0.5 + (sum ? weight / sum : 0) * (1 << 22)))];
  });
}

/** Resize the rows, or the columns, of RGB pixels of w x h to a length of `out`. */
function resizeSide(pixels, w, h, out, isRow) {
  const [newW, newH] = isRow ? [out, h] : [w, out], step = isRow ? 3 : w * 3, half = 1 << 21;
  const resized = new Uint8Array(newW * newH * 3);
  bilinearWeights(isRow ? w : h, out).forEach(([first, weights], i) => {
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

/** Antialiased bilinear with the arithmetic of Pillow 13: RGB pixels of w x h to outW x outH. A canvas' differs. */
export function resize(pixels, w, h, outW, outH) {
  const rows = (from, height) => w === outW ? from : resizeSide(from, w, height, outW, true);
  const columns = (from, width) => h === outH ? from : resizeSide(from, width, h, outH, false);
  // Pillow's order, which changes what is rounded
  const columnsFirst = h > outH && h - outH > (w - outW) * 2;
  return columnsFirst ? rows(columns(pixels, w), outH) : columns(rows(pixels, h), outW);
}

/**
 * A JPEG's or PNG's bytes without its colour profile, which WebKit applies even where it is asked not to; of anything
 * else, and of a file that ends early, the bytes as they are.
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

/** Decode a file onto a canvas: upright, colour profiles not applied, transparency over white, as `infer` does. */
export async function decode(blob, canvas = document.createElement("canvas")) {
  const plain = new Blob(withoutProfile(await blob.arrayBuffer()), { type: blob.type });
  const bitmap = await createImageBitmap(plain, {
    imageOrientation: "from-image", colorSpaceConversion: "none", premultiplyAlpha: "none",
  });
  [canvas.width, canvas.height] = [bitmap.width, bitmap.height];
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.fillStyle = "#fff";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0);
  bitmap.close();
  return context;
}

function toInput({ data, width: w, height: h }) {
  const pixels = new Uint8Array(w * h * 3);
  for (let i = 0, j = 0; i < pixels.length; i += 3, j += 4) {
    pixels[i] = data[j];
    pixels[i + 1] = data[j + 1];
    pixels[i + 2] = data[j + 2];
  }
  return resize(pixels, w, h, width, height);
}

// ---- the forward pass ---------------------------------------------------------------------------------------------

/** Run the graph on a canvas' pixels. */
export async function run(context) {
  const pixels = toInput(context.getImageData(0, 0, context.canvas.width, context.canvas.height));
  const images = new ort.Tensor("uint8", pixels, [1, height, width, 3]);
  const wanted = model.metadata.outputs.filter((name) => name !== "attention");
  const outputs = await session.run({ images }, wanted);
  return {
    logits: outputs.logits.data, cells: outputs.argmax.data, scores: outputs.scores.data,
    perImage: Object.fromEntries(Object.entries(model.per_image).map(([name, output]) => [name, outputs[output].data[0]])),
  };
}

/** Every class's cosine without the slots that are off (and those dropped for good), and the norm of the scores. */
export function computeCosines(scores, off) {
  const map = readClassMap(model.class_map, off), norm = map.norm(scores, epsilon);
  return { cosines: map.totals(scores, norm), norm };
}

/** The classes, best first; of equal values the lowest class first. */
export const rank = (values) => Array.from(values, (_, i) => i).sort((a, b) => values[b] - values[a] || a - b);

function softmax(logits, temperature) {
  const highest = Math.max(...logits);
  const powers = Array.from(logits, (logit) => Math.exp((logit - highest) / temperature));
  const sum = powers.reduce((total, power) => total + power, 0);
  return powers.map((power) => power / sum);
}

/** The slots of a class that are left without those that are off. */
export function findSlots(classId, { scores, cells }, norm, off, imageWidth, imageHeight) {
  return readClassMap(model.class_map, off).slots(classId).map(({ slot, channel, weight }) => {
    const row = Math.floor(cells[channel] / cols), col = cells[channel] % cols;
    const w = imageWidth / cols, h = imageHeight / rows;
    return {
      slot, channel, cell: [row, col], score: scores[channel], contribution: scores[channel] / norm * weight,
      box: [col * w, row * h, (col + 1) * w, (row + 1) * h],
    };
  });
}

/** The rule that decides the status of an image with these quantities, as `records/decision.py`; undefined: ok. */
export const judge = (values) => model.decision.find(({ quantity, above, limit }) => {
  const value = values[quantity] ?? null;
  return value !== null && (above ? value > limit : value < limit);
});

/** What a slot's score usually is: the lowest and highest of its middle 90 % on the validation images. */
function findUsual(classId, slot) {
  const { slots, pooled } = model.metadata.baseline, row = slots?.channel.indexOf(classMap.entry(classId, slot)) ?? -1;
  const score = row < 0 ? pooled?.score : slots.score[row];
  const whose = row < 0 ? "over all classes" : `in ${slots.images[row].toLocaleString("en")} images of this class`;
  return score && { low: score[0], high: score.at(-1), whose };
}

/** Why an image is unknown, in the words of `infer`: its OOD score, and the slot whose score is the least usual. */
function describeOodScore(score, limit, classId, slots) {
  let digits = 2; // as many as tell them apart
  while (digits < 16 && score.toFixed(digits) === limit.toFixed(digits)) digits++;
  const text = `OOD score ${score.toFixed(digits)}, threshold ${limit.toFixed(digits)}`;
  // as Python's .2g
  const short = (value) => {
    const [digits, power] = value.toExponential(1).split("e").map(Number);
    if (power >= -4 && power < 2) return String(Number(value.toPrecision(2)));
    return `${digits}e${power < 0 ? "-" : "+"}${String(Math.abs(power)).padStart(2, "0")}`;
  };
  let worst = 1, words = "";
  for (const { slot, score: here } of slots) {
    const usual = findUsual(classId, slot);
    if (!usual) continue;
    const unusual = Math.max(usual.low / Math.max(here, 1e-9), here / Math.max(usual.high, 1e-9));
    if (unusual <= worst) continue;
    worst = unusual;
    words = `; slot ${slot} usually ${short(usual.low)} to ${short(usual.high)} ${usual.whose}, here ${short(here)}`;
  }
  return text + words;
}

/** The record, in the form of `infer`. */
export function buildRecord(picture, outputs) {
  const { cosines, norm } = computeCosines(outputs.scores, new Set());
  const order = rank(outputs.logits), { temperature } = model;
  const probabilities = temperature ? softmax(outputs.logits, temperature) : null;
  const answer = (classId) => ({
    class_id: classId, label: labels[classId], logit: outputs.logits[classId], cosine: cosines[classId],
    ...(probabilities && { calibrated_probability: probabilities[classId] }),
  });
  const margin = findMargin(cosines, order);
  const evidence = findSlots(order[0], outputs, norm, new Set(), picture.width, picture.height);
  const rule = judge({ margin, ...outputs.perImage });
  const recorded = Object.entries(outputs.perImage).filter(([name]) => model.recorded_outputs.includes(name));
  return {
    schema: 1, image: picture.name, status: rule?.status ?? "ok", image_sha256: picture.sha256, model_sha256: model.model_sha256,
    width: picture.width, height: picture.height, prediction: answer(order[0]),
    margin, ...Object.fromEntries(recorded),
    ...(rule?.quantity === "ood_score" && { reason: describeOodScore(outputs.perImage.ood_score, rule.limit, order[0], evidence) }),
    top: order.slice(0, 5).map(answer), evidence,
  };
}

// ---- what the model promises, checked here ------------------------------------------------------------------------

const fromBase64 = (text) => Uint8Array.from(atob(text), (character) => character.charCodeAt(0));

async function unpack({ zlib }, Type) {
  const stream = new Blob([fromBase64(zlib)]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Type(await new Response(stream).arrayBuffer());
}

export async function digest(bytes) {
  if (!crypto.subtle) return null; // browsers have it on https and on this machine only
  const hash = await crypto.subtle.digest("SHA-256", bytes);
  return Array.from(new Uint8Array(hash), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Run the test vectors; throws where an output is not PyTorch's. */
async function verify() {
  const { vectors, gate } = model;
  const [logits, cells, scores, margins] = await Promise.all([
    unpack(vectors.logits, Float32Array), unpack(vectors.argmax, Int32Array), unpack(vectors.scores, Float32Array),
    unpack(vectors.top2_margin, Float32Array),
  ]);
  const perImage = {};
  for (const [name, output] of Object.entries(model.per_image)) {
    if (vectors[output]) perImage[name] = await unpack(vectors[output], Float32Array);
  }
  let compared = 0, equal = 0, furthest = 0;
  for (const [index, png] of vectors.images.entries()) {
    const context = await decode(new Blob([fromBase64(png)], { type: "image/png" }));
    const outputs = await run(context);
    outputs.logits.forEach((logit, i) => {
      const expected = logits[index * labels.length + i];
      furthest = Math.max(furthest, Math.abs(logit - expected) / Math.max(1, Math.abs(expected)));
    });
    for (const [name, expected] of Object.entries(perImage)) {
      if (!(Math.abs(outputs.perImage[name] - expected[index]) <= gate[name])) throw new Error(`${name} is not PyTorch's`);
    }
    outputs.cells.forEach((cell, channel) => {
      const place = index * classMap.size + channel;
      if (Math.abs(outputs.scores[channel] - scores[place]) > gate.score) throw new Error("a score is not PyTorch's");
      if (margins[place] < gate.tie) return;
      compared += 1;
      equal += cell === cells[place];
    });
  }
  const text = `${equal.toLocaleString("en")} of ${compared.toLocaleString("en")} cells as in PyTorch`;
  // written so that NaN fails, too
  if (equal !== compared || !(furthest <= gate.logit)) throw new Error(`${text}; logits differ by ${furthest}`);
  return text;
}

async function open(bytes, provider) {
  const { script, wasm } = model.runtimes[provider];
  ort = await import(`./ort/${script}`);
  ort.env.wasm.wasmPaths = { wasm: new URL(`ort/${wasm}`, import.meta.url).href };
  ort.env.wasm.numThreads = crossOriginIsolated ? Math.min(4, navigator.hardwareConcurrency || 1) : 1;
  session = await ort.InferenceSession.create(new Uint8Array(bytes), { executionProviders: [provider] });
  return verify();
}

/** Load the model, on the GPU if the site has WebGPU's files and its answers are right, and say what was checked. */
export async function start() {
  if (typeof WebAssembly === "undefined") throw new Error("this browser has no WebAssembly");
  const bytes = await (await fetch("model.onnx")).arrayBuffer();
  const found = await digest(bytes);
  if (found && found !== model.model_sha256) throw new Error("model.onnx is damaged: copy it to the server again");
  let refused = "";
  if (model.runtimes.webgpu) {
    try {
      if (!await navigator.gpu?.requestAdapter()) throw new Error("not available");
      return `${await open(bytes, "webgpu")}, on this device (WebGPU).`;
    } catch (error) {
      refused = `; WebGPU: ${error.message}`;
    }
  }
  const checked = await open(bytes, "wasm"), threads = ort.env.wasm.numThreads;
  return `${checked}, on this device (WebAssembly, ${threads} ${threads === 1 ? "thread" : "threads"}${refused}).`;
}
