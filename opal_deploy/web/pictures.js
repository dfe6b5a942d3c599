// Opens pictures in a worker, so that the page stays responsive, and refuses those that are too large for it.

const MAX_MEGAPIXELS = 50, MAX_MEGABYTES = 200, SECONDS = 120;
const waiting = new Map();
let worker = null, asked = 0;

/** End the worker, whose tasks all fail; the next task starts another one. */
function giveUp(reason) {
  worker?.terminate();
  worker = null;
  for (const { reject, timer } of waiting.values()) {
    clearTimeout(timer);
    reject(new Error(reason));
  }
  waiting.clear();
}

function ask(task, request) {
  if (!worker) {
    worker = new Worker(new URL("worker.js", import.meta.url), { type: "module" });
    worker.addEventListener("error", (event) => giveUp(event.message || "worker.js does not run: copy it to the server again"));
    worker.addEventListener("message", ({ data: { id, answer, problem } }) => {
      const { resolve, reject, timer } = waiting.get(id) ?? {};
      clearTimeout(timer);
      waiting.delete(id);
      if (problem) reject?.(new Error(problem));
      else resolve?.(answer);
    });
  }
  return new Promise((resolve, reject) => {
    const timer = setTimeout(() => giveUp(`it took longer than ${SECONDS} s`), SECONDS * 1000);
    waiting.set(asked, { resolve, reject, timer });
    worker.postMessage({ id: asked++, task, request });
  });
}

/** Throw unless a file is a picture of a size that a browser can hold; browsers read no more than its header for that. */
async function check(blob) {
  if (blob.size > MAX_MEGABYTES * 1e6)
    throw new Error(`${(blob.size / 1e6).toFixed(0)} MB; this page takes up to ${MAX_MEGABYTES} MB: make it smaller`);
  const image = new Image(), url = URL.createObjectURL(blob);
  try {
    await new Promise((resolve, reject) => {
      image.onload = resolve;
      image.onerror = reject;
      image.src = url;
    });
  } catch {
    throw new Error("not a picture that this browser can open; try JPEG, PNG, WebP or AVIF (HEIC opens in Safari)");
  } finally {
    URL.revokeObjectURL(url);
  }
  const { naturalWidth: width, naturalHeight: height } = image;
  if (width * height > MAX_MEGAPIXELS * 1e6)
    throw new Error(`${width} x ${height} pixels; this page takes up to ${MAX_MEGAPIXELS} megapixels: make it smaller`);
}

/** Open a picture for a model's form of input, {width, height, rule}: {width, height, crop, sha256, input, preview}; see worker.js. */
export async function openPicture(blob, options) {
  await check(blob);
  try {
    return await ask("open", { blob, ...options });
  } catch (error) {
    throw new Error(`cannot be opened (${error.message})`);
  }
}

/** The model's input of a crop of the picture that was kept, after parts of it are covered. */
export const readPicture = async (marks, crop, form) => (await ask("read", { marks, crop, form })).input;
