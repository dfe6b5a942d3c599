// Decodes pictures away from the page, and keeps the one that is shown at its full size.
import { cover, decode, digest, toInput } from "./pixels.js";

const PREVIEW_PIXELS = 2_000_000;
let shown;

/** A picture's pixels in a canvas of at most so many pixels, for the page to draw. */
function preview({ canvas }, pixels) {
  const share = Math.min(1, Math.sqrt(pixels / (canvas.width * canvas.height)));
  const small = new OffscreenCanvas(Math.max(1, Math.round(canvas.width * share)), Math.max(1, Math.round(canvas.height * share)));
  const context = small.getContext("2d");
  context.imageSmoothingQuality = "high";
  context.drawImage(canvas, 0, 0, small.width, small.height);
  return small.transferToImageBitmap();
}

const tasks = {
  /** Decode a file; with `keep`, later tasks are about it. Without a crop the input is that of the whole picture. */
  async open({ blob, form, crop, keep, pixels }) {
    const bytes = await blob.arrayBuffer(), sha256 = await digest(bytes);
    const context = await decode(bytes, blob.type), { canvas } = context;
    if (keep) shown = context;
    const part = crop ?? [0, 0, canvas.width, canvas.height];
    const found = { sha256, width: canvas.width, height: canvas.height, crop: part, input: toInput(context, part, form) };
    return { ...found, preview: preview(context, pixels ?? PREVIEW_PIXELS) };
  },
  /** Cover parts of the shown picture, and return the input of a crop of it. */
  read({ marks, crop, form }) {
    if (!shown) throw new Error("the picture is gone: choose it again");
    cover(shown, marks);
    return { input: toInput(shown, crop, form) };
  },
};

addEventListener("message", async ({ data: { id, task, request } }) => {
  try {
    const answer = await tasks[task](request);
    postMessage({ id, answer }, [answer.input.buffer, answer.preview].filter(Boolean));
  } catch (error) {
    postMessage({ id, problem: error.message });
  }
});
