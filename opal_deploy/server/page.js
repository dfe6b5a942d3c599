"use strict";
// shows the record, and the picture with its boxes
const byId = (id) => document.getElementById(id);
const file = byId("file"), model = byId("model"), token = byId("token"), send = byId("send");
const { say } = evidence;
// the answer to an outdated request is not shown
let current = 0;

async function post(image) {
  const query = new URLSearchParams({ model: model.value, name: image.name || "pasted" });
  const headers = token.value ? { Authorization: `Bearer ${token.value}` } : {};
  const response = await fetch(`explain?${query}`, { method: "POST", body: image, headers });
  if (response.ok) return response;
  if (response.status === 401) {
    byId("token-field").hidden = false;
    token.focus();
    throw new Error("this server requires a token");
  }
  let reason = `the server answered ${response.status}`;
  try { reason = (await response.json()).error; } catch { /* a proxy answered */ }
  throw new Error(reason);
}

function showRecord(record) {
  const { status, evidence: slots } = record;
  byId("label").replaceChildren(...evidence.headline(record));
  byId("flag").hidden = status === "ok";
  byId("flag").textContent = status === "unknown" ? `Unknown: ${record.reason}`
    : "Abstained: the margin is too small for an answer";
  byId("figures").replaceChildren(...evidence.summary(record));
  byId("slots").replaceChildren(...(slots?.length
    ? [evidence.evidenceTable(record, (slot, row) => evidence.link(row, slot.channel))] : []));
  byId("record").textContent = JSON.stringify(record, null, 2);
  byId("figure").hidden = true;
  byId("answer").hidden = false;
}

/** Show the picture with its boxes; browsers cannot show every kind that the server reads. */
async function showPicture(file, record) {
  const image = byId("image");
  URL.revokeObjectURL(image.src);
  image.src = URL.createObjectURL(file);
  image.alt = `The picture, predicted ${record.prediction.label}; the table says where each slot looks`;
  await image.decode();
  evidence.drawBoxes(byId("boxes"), record.evidence ?? [], record.width, record.height, { record });
  byId("figure").hidden = false;
}

function describeError(image, error) {
  return `${image.name}: ${error instanceof TypeError ? "cannot reach the server" : error.message}`;
}

async function explain(image, others = 0) {
  const number = ++current;
  byId("answer").hidden = true;
  send.disabled = true;
  say("Classifying …");
  try {
    const record = await (await post(image)).json();
    if (number !== current) return;
    showRecord(record);
    await showPicture(image, record).catch(() => {});
    say(others ? `${image.name} is answered; ${others} other ${others === 1 ? "file is" : "files are"} not: this page takes one at a time, \`opal-deploy infer\` any number` : "");
  } catch (error) {
    if (number !== current) return;
    say(describeError(image, error), true);
  } finally {
    if (number === current) send.disabled = false;
  }
}

byId("form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (file.files.length) explain(file.files[0]);
});
evidence.takePictures((files) => {
  file.files = files;
  explain(files[0], files.length - 1);
});
