// Run ONNX files in ONNX Runtime Web (wasm), as `run.py` does; arguments: its module and FOLDER.
import { readFileSync, readdirSync, writeFileSync } from "node:fs";
const [, , module, folder] = process.argv;
const ort = await import(module);
ort.env.wasm.numThreads = 1;
const batches = JSON.parse(readFileSync(`${folder}/images.json`));
const pixels = readFileSync(`${folder}/images.bin`);

function normalise(bytes, [count, height, width, channels]) {
  const size = height * width, values = new Float32Array(bytes.length);
  for (let place = 0; place < values.length; place++) {
    const pixel = Math.floor(place / channels), image = Math.floor(pixel / size), channel = place % channels;
    values[(image * channels + channel) * size + (pixel % size)] = bytes[place] / 64 - 2;
  }
  return new ort.Tensor("float32", values, [count, channels, height, width]);
}

const results = {}, errors = {};
for (const file of readdirSync(folder).filter((name) => name.endsWith(".onnx")).sort()) {
  const stem = file.replace(".onnx", "");
  try {
    const session = await ort.InferenceSession.create(`${folder}/${file}`);
    for (const [count, shape] of Object.entries(batches)) {
      const bytes = new Uint8Array(pixels.subarray(0, shape.reduce((a, b) => a * b)));
      const images = stem === "float32" ? normalise(bytes, shape) : new ort.Tensor("uint8", bytes, shape);
      const outputs = await session.run({ images });
      for (const [name, value] of Object.entries(outputs)) {
        results[`${stem}/${count}/${name}`] = { shape: value.dims, data: Array.from(value.data) };
      }
    }
  } catch (error) {
    errors[stem] = String(error).split("\n")[0];
  }
}
writeFileSync(`${folder}/web.results.json`, JSON.stringify({ results, errors, version: ort.env.versions.web }));
