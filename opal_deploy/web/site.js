// The page: takes pictures, shows answers and their evidence, and lets people try them.
import { buildRecord, classMap, computeCosines, decode, digest, findSlots, judge, labels, model, rank, run, start } from "./model.js";

const byId = (id) => document.getElementById(id);
const { el, number, say } = evidence;
const canvas = byId("picture");
let current = null, working = Promise.resolve();

// ---- an answer ----------------------------------------------------------------------------------------------------

/** `findSlots` for the picture that is shown. */
function slotsOf(classId, off, norm) {
  const { outputs, picture } = current;
  return findSlots(classId, outputs, norm, off, picture.width, picture.height);
}

/** Put a slot's switch, and patches of training images that it answered to, into its row. */
function addSwitch(row, slot, classId, isLast) {
  const { off } = current, label = labels[classId], isOff = off.has(slot.channel);
  const box = el("input", { type: "checkbox", "aria-label": `${label}, slot ${slot.slot} counts` });
  Object.assign(box, { checked: !isOff, disabled: isLast && !isOff });
  box.dataset.switch = slot.channel;
  box.addEventListener("change", () => {
    off[box.checked ? "delete" : "add"](slot.channel);
    showAnswer();
    document.querySelector(`[data-switch="${slot.channel}"]`)?.focus();
  });
  row.firstChild.prepend(el("label", null, box), " ");
  evidence.link(row, slot.channel);
  const patches = (model.patches?.[`${classId}/${slot.slot}`] ?? []).map((source) =>
    el("img", { src: source, alt: `slot ${slot.slot} of ${label} in a training image`, width: 48, height: 48, loading: "lazy" }));
  if (patches.length) row.children[1].append(el("div", { class: "patches" }, ...patches));
}

/** Return a class with its slots; the contributions of those that are left add up to the cosine. */
function buildClass(classId, cosine, norm, left, longest) {
  const parts = new Map(left.map((slot) => [slot.channel, slot.contribution]));
  const slots = slotsOf(classId, new Set(), norm).map((slot) => ({ ...slot, contribution: parts.get(slot.channel) ?? 0 }));
  const table = evidence.evidenceTable({ evidence: slots, prediction: { cosine }, top: classId === current.record.prediction.class_id && [] },
    (slot, row) => addSwitch(row, slot, classId, left.length === 1), longest);
  return el("section", { class: "class" }, el("h3", null, labels[classId]),
    el("p", { class: "soft" }, `cosine ${number(cosine)}`), table);
}

const quote = (text) => /^[\w./-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\"'\"'")}'`;

function showAnswer() {
  const { outputs, off, record, picture } = current;
  const { cosines, norm } = computeCosines(outputs.scores, off);
  // without a switch the order is that of the logits, to their last bit
  const order = off.size ? rank(cosines) : rank(outputs.logits);
  const [first, second] = order, was = record.prediction.class_id;
  // classes with a switched slot stay, so that it can be switched on again
  const touched = [...off].flatMap(classMap.owners);
  const classes = [...new Set([first, second, was, ...touched.map(([classId]) => classId)])].filter((classId) => classId !== undefined);
  const [left, ...others] = classes.map((classId) => slotsOf(classId, off, norm));
  const shown = off.size ? {
    width: picture.width, height: picture.height, status: record.status === "unknown" ? "unknown" : judge({ margin: findMargin(cosines, order) })?.status ?? "ok",
    prediction: { label: labels[first], cosine: cosines[first] }, margin: findMargin(cosines, order),
    top: order.slice(0, 2).map((classId) => ({ label: labels[classId], cosine: cosines[classId] })), evidence: left,
  } : record;
  const unsure = judge({ margin: shown.margin });
  byId("flag").textContent = record.status === "unknown" ? `Unknown: ${record.reason}`
    : unsure ? `Not sure: the margin is below ${number(unsure.limit)}` : "";
  byId("flag").hidden = !byId("flag").textContent;
  byId("label").replaceChildren(...evidence.headline(shown));
  byId("figures").replaceChildren(...evidence.summary(shown));
  byId("change").textContent = !off.size ? "" : first === was
    ? `The answer stays without ${off.size === 1 ? "this slot" : "these slots"}.`
    : `With all slots the answer was ${labels[was]}.`;
  evidence.drawBoxes(byId("boxes"), left, picture.width, picture.height, { others: others.flat(), record: shown });
  const longest = Math.max(...[left, ...others].flat().map((slot) => slot.contribution));
  byId("classes").replaceChildren(...classes.map((classId, i) =>
    buildClass(classId, cosines[classId], norm, [left, ...others][i], longest)));
  const drops = touched.map(([classId, slot]) => `--drop ${quote(`${labels[classId]}/${slot}`)}`);
  byId("permanent").hidden = !off.size;
  byId("command").textContent = `opal-deploy edit ${quote(model.source)} ${drops.join(" ")}`;
  byId("record").textContent = JSON.stringify(record, null, 2);
  byId("answer").hidden = false;
}

/** Answer for what is on the canvas now. */
async function answer(picture) {
  const outputs = await run(canvas.getContext("2d"));
  current = { picture, outputs, off: new Set(), record: buildRecord(picture, outputs) };
  showAnswer();
}

/** Do something after all that was begun before, so that an answer belongs to its picture. */
function queue(work) {
  working = working.then(work).catch((error) => say(`No answer: ${error.message}`, true));
}

/** Answer for a picture: a blob, or a function that fetches one. */
const explain = (picture) => queue(async () => {
  say("Looking …");
  const blob = picture instanceof Blob ? picture : await picture(), name = blob.name ?? null;
  const sha256 = await digest(await blob.arrayBuffer());
  try {
    await decode(blob, canvas);
  } catch {
    say(`${name ?? "This"}: not a picture that this browser can open; try JPEG, PNG, WebP or AVIF (HEIC opens in Safari).`, true);
    return;
  }
  const began = performance.now();
  await answer({ name, sha256, width: canvas.width, height: canvas.height, blob });
  byId("uncover").hidden = true;
  const ms = performance.now() - began;
  say(`Answered in ${ms < 1000 ? `${ms.toFixed(0)} ms` : `${(ms / 1000).toFixed(1)} s`}; nothing was uploaded.`);
});

// ---- covering parts of the picture --------------------------------------------------------------------------------

let painting = false;

function paint(draw) {
  const context = canvas.getContext("2d");
  context.fillStyle = "rgb(127, 127, 127)";
  draw(context);
}

function brush(event) {
  const frame = canvas.getBoundingClientRect();
  const x = (event.clientX - frame.left) * canvas.width / frame.width;
  const y = (event.clientY - frame.top) * canvas.height / frame.height;
  paint((context) => {
    context.beginPath();
    context.arc(x, y, Math.max(canvas.width, canvas.height) / 16, 0, 2 * Math.PI);
    context.fill();
  });
}

const answerCovered = () => queue(async () => {
  const before = current.uncovered ?? current.record.prediction;
  await answer(current.picture);
  current.uncovered = before;
  const { label, cosine } = current.record.prediction;
  byId("uncover").hidden = false;
  say(`Covered: ${label}, cosine ${number(cosine)}; before: ${before.label}, ${number(before.cosine)}.`);
});

canvas.addEventListener("pointerdown", (event) => {
  if (!byId("brush").checked || !current) return;
  painting = true;
  canvas.setPointerCapture(event.pointerId);
  brush(event);
});
canvas.addEventListener("pointermove", (event) => { if (painting) brush(event); });
canvas.addEventListener("pointerup", () => {
  if (painting) answerCovered();
  painting = false;
});
byId("brush").addEventListener("change", () => canvas.classList.toggle("brush", byId("brush").checked));
byId("cover").addEventListener("click", () => {
  const { cosines, norm } = computeCosines(current.outputs.scores, current.off);
  const slots = slotsOf(current.off.size ? rank(cosines)[0] : current.record.prediction.class_id, current.off, norm);
  paint((context) => { for (const { box: [x0, y0, x1, y1] } of slots) context.fillRect(x0, y0, x1 - x0, y1 - y0); });
  answerCovered();
});
byId("uncover").addEventListener("click", () => explain(current.picture.blob));

// ---- where pictures come from -------------------------------------------------------------------------------------

for (const button of document.querySelectorAll("#examples button")) {
  const source = button.querySelector("img").getAttribute("src");
  // from the browser's cache, where the image already is
  const load = async () => new File([await (await fetch(source, { cache: "force-cache" })).blob()], source.split("/").pop());
  button.addEventListener("click", () => explain(load));
}
evidence.takePictures(explain);

const video = byId("video");

function closeCamera() {
  for (const track of video.srcObject?.getTracks() ?? []) track.stop();
  video.srcObject = null;
  byId("viewfinder").hidden = true;
}

byId("camera").hidden = !navigator.mediaDevices; // browsers have it on https and on this machine only
byId("camera").addEventListener("click", async () => {
  try {
    video.srcObject = await navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment" } });
    byId("viewfinder").hidden = false;
    byId("shoot").focus();
  } catch (error) {
    say(`No camera: ${error.message}. Allow it in the browser, or choose a file.`, true);
  }
});
byId("shoot").addEventListener("click", async () => {
  const frame = el("canvas", { width: video.videoWidth, height: video.videoHeight });
  frame.getContext("2d").drawImage(video, 0, 0);
  closeCamera();
  explain(new File([await new Promise((resolve) => { frame.toBlob(resolve); })], "camera.png"));
});
byId("close").addEventListener("click", closeCamera);

say("Loading the model …");
try {
  byId("checked").textContent = await start();
  document.documentElement.dataset.ready = "yes";
  for (const control of document.querySelectorAll("#file, #camera, #examples button")) control.disabled = false;
  say("");
} catch (error) {
  say(`This page answers nothing, because the model does not run here as it was verified: ${error.message}`, true);
}
