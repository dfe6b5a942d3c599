"use strict";
// shows the record first, then the picture with its boxes; without scripts, the form shows only a drawing
const byId = (id) => document.getElementById(id);
const file = byId("file"), model = byId("model"), token = byId("token"), send = byId("send");
const { say } = evidence;
// the answer to an outdated request is not shown
let current = 0;

async function post(image, format) {
  const query = new URLSearchParams({ model: model.value, format, name: image.name || "pasted" });
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
  byId("figure").hidden = byId("drawn").hidden = true;
  byId("answer").hidden = false;
}

/** Show a blob in an image; the address of the one before is given back. */
function showImage(id, blob, alt) {
  const image = byId(id);
  URL.revokeObjectURL(image.src);
  image.src = URL.createObjectURL(blob);
  image.alt = alt;
}

function showPicture(blob, format, record) {
  showImage("image", blob, `The picture, predicted ${record.prediction.label}; the table says where each slot looks`);
  // an overlay has its boxes
  if (format === "picture") evidence.drawBoxes(byId("boxes"), record.evidence, record.width, record.height, { record });
  else byId("boxes").replaceChildren();
  byId("figure").hidden = false;
}

async function drawSheet(image, record) {
  const number = current;
  byId("sheet").disabled = true;
  say("Drawing …");
  try {
    const blob = await (await post(image, "sheet")).blob();
    if (number !== current) return;
    showImage("drawing", blob, `Evidence sheet: why ${record.prediction.label}`);
    byId("open").href = byId("save").href = byId("drawing").src;
    byId("save").download = "sheet.png";
    byId("drawn").hidden = false;
    byId("sheet").hidden = true;
    say("");
  } catch (error) {
    if (number === current) say(describeError(image, error), true);
  } finally {
    byId("sheet").disabled = false;
  }
}

function describeError(image, error) {
  return `${image.name}: ${error instanceof TypeError ? "cannot reach the server" : error.message}`;
}

async function explain(image, others = 0) {
  const number = ++current;
  const option = model.selectedOptions ? model.selectedOptions[0] : model;
  const [format, drawing] = option.dataset.formats.split(" ");
  byId("answer").hidden = true;
  send.disabled = true;
  say("Classifying …");
  try {
    const record = await (await post(image, "record")).json();
    if (number !== current) return;
    showRecord(record);
    byId("sheet").hidden = drawing !== "sheet";
    byId("sheet").onclick = () => drawSheet(image, record);
    if (format !== "record") {
      const blob = await (await post(image, format)).blob();
      if (number !== current) return;
      showPicture(blob, format, record);
    }
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
