// Answers and explains pictures with the exported graph, in this browser. The numbers are those of `opal-deploy infer`.
import { readMetadata } from "./onnx.js";
import { openPicture } from "./pictures.js";
import { digest, fit } from "./pixels.js";

/** What `start` has read: model.json, the metadata inside model.onnx, its class names, and its class map. */
export let model, metadata, labels, classMap;
let ort, session;

/** The form of the model's input. */
export const inputForm = () => ({ height: metadata.input_size[0], width: metadata.input_size[1], rule: metadata.resize });

// ---- the forward pass ---------------------------------------------------------------------------------------------

/** Pixels [H0, W0, 3] as a graph without normalisation takes them: float32 [3, H0, W0], as `preprocess/resize.py`. */
function normalise(pixels) {
  const { mean, std } = metadata, size = pixels.length / 3, values = new Float32Array(pixels.length);
  for (let channel = 0; channel < 3; channel++) {
    const [middle, spread] = [Math.fround(mean[channel]), Math.fround(std[channel])];
    const table = Float32Array.from({ length: 256 }, (_, value) => Math.fround(Math.fround(value / 255) - middle) / spread);
    for (let i = 0; i < size; i++) values[channel * size + i] = table[pixels[3 * i + channel]];
  }
  return values;
}

/** Run the graph on a picture's input. */
export async function run(pixels) {
  const [height, width] = metadata.input_size;
  const images = metadata.input_kind === "float32" ? new ort.Tensor("float32", normalise(pixels), [1, 3, height, width])
    : new ort.Tensor("uint8", new Uint8Array(pixels.buffer), [1, height, width, 3]);
  const wanted = metadata.outputs.filter((name) => name !== "attention");
  const outputs = await session.run({ images }, wanted);
  return {
    logits: outputs.logits.data, cells: outputs.argmax?.data, scores: outputs.scores?.data,
    shared: outputs.share_classes && Array.from(outputs.share_classes.data), shares: outputs.shares?.data,
    perImage: Object.fromEntries(model.per_image.map((name) => [name, outputs[name].data[0]])),
  };
}

/** Whether the head is OPAL's, whose totals are cosines; others' are logits (`artifact/heads.py`). */
const isOpal = () => (metadata.head.kind ?? "opal") === "opal";

/** Whether classes share prototypes, which then have numbers instead of slots of classes. */
export const isShared = () => ["softmax", "distance"].includes(metadata.head.kind);

/** Whether the evidence is regions of cells with shares of the logit, which cannot be switched off. */
export const hasRegions = () => metadata.evidence === "regions";

/** Whether an image may have several labels. */
const isMultiLabel = () => metadata.head.activation === "sigmoid";

/** Every class's total without the slots that are off (and those dropped for good), and what scores are divided by. */
export function computeTotals({ scores, logits }, off) {
  if (hasRegions()) return { totals: Array.from(logits), norm: 1 };
  const map = readClassMap(model.class_map, off), norm = isOpal() ? map.norm(scores, metadata.head.epsilon) : 1;
  return { totals: map.totals(scores, norm), norm };
}

/** A class in a record: its cosine, or its logit where classes share prototypes. */
export const describeClass = (classId, total) =>
  ({ label: labels[classId], cosine: isOpal() ? total : null, logit: total });

/** What the listed slots of a class lack to its logit; nothing for OPAL's head. */
export function findRest(classId, total, slots) {
  if (isOpal()) return {};
  const bias = model.class_map.biases[classId];
  return { rest: total - bias - slots.reduce((sum, { contribution }) => sum + contribution, 0), bias };
}

/** The classes, best first; of equal values the lowest class first. */
export const rank = (values) => Array.from(values, (_, i) => i).sort((a, b) => values[b] - values[a] || a - b);

function softmax(logits, temperature) {
  const highest = Math.max(...logits);
  const powers = Array.from(logits, (logit) => Math.exp((logit - highest) / temperature));
  const sum = powers.reduce((total, power) => total + power, 0);
  return powers.map((power) => power / sum);
}

const moveBox = (place, count) => Math.min(Math.max(place + (metadata.receptive_field?.box_offset ?? 0), 0), count - 1);

/** The box of the cells from one to another in a picture {crop, width, height}, as `artifact/cells.py`. */
function findBox([row, col], [lastRow, lastCol], { crop, width, height }) {
  const [rows, cols] = metadata.grid, [x0, y0, x1, y1] = fit(crop, inputForm()).shown;
  const w = (x1 - x0) / cols, h = (y1 - y0) / rows;
  // inside the picture: a cell in a letterbox's bar has the nearest pixel, as `find_boxes` of records/evidence.py
  const side = (first, last, size) => {
    const [low, high] = [first, last].map((value) => Math.min(Math.max(value, 0), size));
    const start = low < high ? low : Math.min(low, size - 1);
    return [start, start < high ? high : start + 1];
  };
  const [left, right] = side(x0 + moveBox(col, cols) * w, x0 + (moveBox(lastCol, cols) + 1) * w, width);
  const [top, bottom] = side(y0 + moveBox(row, rows) * h, y0 + (moveBox(lastRow, rows) + 1) * h, height);
  return [left, top, right, bottom];
}

/** The shares of a class's cells, in rows; undefined where the graph has none of it. */
export function findShares(classId, { shared, shares }) {
  const place = shared?.indexOf(classId) ?? -1, cells = metadata.grid[0] * metadata.grid[1];
  return place < 0 ? undefined : shares.subarray(place * cells, (place + 1) * cells);
}

/** The regions that speak for a class, as `records/regions.py`: strong cells that touch. */
function findRegions(classId, outputs, picture) {
  const cols = metadata.grid[1], shares = findShares(classId, outputs), order = rank(shares), left = new Set();
  const half = order.reduce((sum, cell) => sum + Math.max(shares[cell], 0), 0) / 2, regions = [];
  let reached = 0;
  for (const cell of order) {
    left.add(cell);
    reached += Math.max(shares[cell], 0);
    if (reached >= half) break;
  }
  for (const first of left) {
    const pending = [first], cells = [];
    left.delete(first);
    while (pending.length) {
      const cell = pending.pop(), col = cell % cols;
      cells.push(cell);
      for (const near of [cell - cols, cell + cols, ...(col ? [cell - 1] : []), ...(col < cols - 1 ? [cell + 1] : [])])
        if (left.delete(near)) pending.push(near);
    }
    const peak = cells.reduce((best, cell) => shares[cell] > shares[best] || (shares[cell] === shares[best] && cell < best) ? cell : best);
    const [inRow, inCol] = [cells.map((cell) => Math.floor(cell / cols)), cells.map((cell) => cell % cols)];
    regions.push({
      cell: [Math.floor(peak / cols), peak % cols], score: shares[peak], contribution: cells.reduce((sum, cell) => sum + shares[cell], 0),
      box: findBox([Math.min(...inRow), Math.min(...inCol)], [Math.max(...inRow), Math.max(...inCol)], picture),
    });
  }
  const most = metadata.prototypes_per_class, at = ({ cell: [row, col] }) => row * cols + col;
  return regions.sort((a, b) => b.contribution - a.contribution || at(a) - at(b)).slice(0, most)
    .map((region, slot) => ({ slot, channel: classId * most + slot, ...region }));
}

/** The slots of a class that are left without those that are off, with their boxes in a picture {crop, width, height}. */
export function findSlots(classId, outputs, norm, off, picture) {
  if (hasRegions()) return outputs.shared.includes(classId) ? findRegions(classId, outputs, picture) : [];
  const { scores, cells } = outputs, cols = metadata.grid[1];
  const kept = readClassMap(model.class_map, isShared() ? new Set() : off).slots(classId);
  const slots = kept.map(({ slot, channel, weight }) => {
    const row = Math.floor(cells[channel] / cols), col = cells[channel] % cols;
    return {
      slot, channel, cell: [row, col], score: scores[channel], contribution: scores[channel] / norm * weight,
      box: findBox([row, col], [row, col], picture),
    };
  });
  if (!isShared()) return slots;
  // as `records/build.py`: the largest absolute contributions, largest first
  const strength = ({ contribution }) => Math.abs(contribution);
  return slots.sort((a, b) => strength(b) - strength(a) || a.slot - b.slot).slice(0, model.most_listed)
    .filter((slot, place) => (place === 0 || slot.contribution) && !off.has(slot.channel));
}

/** The rule that decides the status of an image with these quantities, as `records/decision.py`; undefined: ok. */
export const judge = (values) => model.decision.find(({ quantity, above, limit }) => {
  const value = values[quantity] ?? null;
  return value !== null && (above ? value > limit : value < limit);
});

/** What a slot's score usually is: the lowest and highest of its middle 90 % on the validation images. */
function findUsual(classId, slot) {
  const { slots, pooled } = metadata.baseline ?? {}, row = slots?.channel.indexOf(classMap.entry(classId, slot)) ?? -1;
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
  const { totals, norm } = computeTotals(outputs, new Set());
  const order = rank(outputs.logits), { temperature } = model;
  const probabilities = temperature ? softmax(outputs.logits, temperature) : null;
  const answer = (classId) => ({
    class_id: classId, label: labels[classId], logit: outputs.logits[classId], cosine: isOpal() ? totals[classId] : null,
    ...(probabilities && { calibrated_probability: probabilities[classId] }),
  });
  // a runner-up may be right as well
  const margin = isMultiLabel() ? null : findMargin(totals, order);
  const evidence = findSlots(order[0], outputs, norm, new Set(), picture);
  const rule = judge({ margin, ...outputs.perImage });
  const recorded = Object.entries(outputs.perImage).filter(([name]) => model.recorded_outputs.includes(name));
  return {
    schema: 1, image: picture.name, status: rule?.status ?? "ok", image_sha256: picture.sha256, model_sha256: model.model_sha256,
    width: picture.width, height: picture.height, prediction: answer(order[0]),
    margin, ...Object.fromEntries(recorded),
    ...(rule?.quantity === "ood_score" && { reason: describeOodScore(outputs.perImage.ood_score, rule.limit, order[0], evidence) }),
    top: order.slice(0, 5).map(answer), ...(isMultiLabel() && { labels: findLabels(order, outputs, picture) }),
    evidence, ...findRest(order[0], totals[order[0]], evidence),
  };
}

/** The labels of an image that may have several, each with its own evidence. */
const findLabels = (order, outputs, picture) => order.filter((classId) => outputs.logits[classId] > 0).map((classId) => {
  const logit = outputs.logits[classId], parts = findSlots(classId, outputs, 1, new Set(), picture);
  const known = parts.length ? { evidence: parts, ...findRest(classId, logit, parts) } : {};
  return { class_id: classId, label: labels[classId], logit, probability: 1 / (1 + Math.exp(-logit)), ...known };
});

// ---- what the model promises, checked here ------------------------------------------------------------------------

// of a logit's size: how far shares and bias may be off, as when the file was exported
const ADDS_UP = 1e-5;
const fromBase64 = (text) => Uint8Array.from(atob(text), (character) => character.charCodeAt(0));

async function unpack({ zlib }, Type) {
  const stream = new Blob([fromBase64(zlib)]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Type(await new Response(stream).arrayBuffer());
}

/** A score, or the squared distance that it comes from: near 0 the score's logarithm is too steep to compare. */
function comparable(score) {
  const { similarity, epsilon, scale = 1 } = metadata.head;
  if (!isShared()) return score / Math.max(scale, 1);
  return similarity === "log" ? Math.max((1 - epsilon * Math.exp(score)) / Math.max(Math.expm1(score), 1e-12), 0) : score;
}

/** Run the test vectors; throws where an output is not PyTorch's. */
async function verify() {
  const { gate } = model, vectors = metadata.test_vectors, [height, width] = metadata.input_size;
  const [logits, cells, scores, margins] = await Promise.all([
    unpack(vectors.logits, Float32Array), ...(hasRegions() ? [] : [
      unpack(vectors.argmax, Int32Array), unpack(vectors.scores, Float32Array), unpack(vectors.top2_margin, Float32Array),
    ]),
  ]);
  const perImage = {};
  for (const name of model.per_image) {
    if (vectors[name]) perImage[name] = await unpack(vectors[name], Float32Array);
  }
  let compared = 0, equal = 0, furthest = 0, missed = 0;
  for (const [index, png] of vectors.images.entries()) {
    const outputs = await run((await openPicture(new Blob([fromBase64(png)], { type: "image/png" }), { form: { width, height } })).input);
    outputs.logits.forEach((logit, i) => {
      const expected = logits[index * labels.length + i];
      furthest = Math.max(furthest, Math.abs(logit - expected) / Math.max(1, Math.abs(expected)));
    });
    for (const [name, expected] of Object.entries(perImage)) {
      if (!(Math.abs(outputs.perImage[name] - expected[index]) <= gate[name])) throw new Error(`${name} is not PyTorch's`);
    }
    for (const classId of outputs.shared ?? []) {
      const sum = findShares(classId, outputs).reduce((total, share) => total + share, model.class_map.biases[classId]);
      missed = Math.max(missed, Math.abs(sum - outputs.logits[classId]) / Math.max(...outputs.logits.map(Math.abs)));
    }
    outputs.cells?.forEach((cell, channel) => {
      const place = index * classMap.size + channel;
      if (Math.abs(comparable(outputs.scores[channel]) - comparable(scores[place])) > gate.score) throw new Error("a score is not PyTorch's");
      if (margins[place] < gate.tie) return;
      compared += 1;
      equal += cell === cells[place];
    });
  }
  const text = hasRegions() ? `Logits of ${vectors.images.length} images as exported; the cells' shares add up to them` : `${equal.toLocaleString("en")} of ${compared.toLocaleString("en")} cells as in PyTorch`;
  // written so that NaN fails, too
  if (!(missed <= ADDS_UP)) throw new Error(`the cells' shares miss the logit by ${missed} of its size`);
  if (equal !== compared || !(furthest <= gate.logit))
    throw new Error(`${hasRegions() ? "" : `${text}; `}logits differ by ${furthest}`);
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

/** Fetch one of the site's files; throws with its name where that fails. */
async function read(name) {
  const response = await fetch(name);
  if (!response.ok) throw new Error(`${name}: the server answered ${response.status}`);
  return response.arrayBuffer();
}

/** Load the model, on the GPU if the site has WebGPU's files and its answers are right, and say what was checked. */
export async function start() {
  if (typeof WebAssembly === "undefined") throw new Error("this browser has no WebAssembly");
  const document_ = await read("model.json"), found = await digest(document_);
  if (found && found !== document.querySelector("main").dataset.document)
    throw new Error("model.json is damaged, or of another export: copy the whole folder to the server again");
  model = JSON.parse(new TextDecoder().decode(document_));
  const bytes = await read("model.onnx"), own = await digest(bytes);
  if (own && own !== model.model_sha256) throw new Error("model.onnx is damaged: copy it to the server again");
  metadata = readMetadata(bytes);
  labels = metadata.class_names;
  classMap = readClassMap(model.class_map);
  if (classMap.size !== (isShared() ? 1 : labels.length) * metadata.prototypes_per_class)
    throw new Error("model.json and model.onnx are of different models: copy the whole folder to the server again");
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
