// Reads the metadata that `opal-deploy export` writes into an ONNX file (docs/contract.md), without reading the graph.

const METADATA_PROPS = 14, KEY = 1, VALUE = 2;

/** Yield [field number, bytes or null] of a message in protobuf's wire format. */
function* fields(bytes) {
  let at = 0;
  const varint = () => {
    // numbers over 2^53 do not occur where they matter
    for (let value = 0, scale = 1; ; scale *= 128) {
      if (at >= bytes.length) throw new Error("model.onnx ends early: copy it to the server again");
      const byte = bytes[at++];
      value += (byte & 0x7f) * scale;
      if (byte < 0x80) return value;
    }
  };
  while (at < bytes.length) {
    const key = varint(), kind = key % 8;
    if (kind === 0) varint();
    const length = kind === 2 ? varint() : { 0: 0, 1: 8, 5: 4 }[kind];
    if (length === undefined) throw new Error("model.onnx is no ONNX file: copy it to the server again");
    yield [Math.floor(key / 8), kind === 2 ? bytes.subarray(at, at + length) : null];
    at += length;
  }
}

/** Return the metadata of an ONNX file. */
export function readMetadata(buffer) {
  const text = (bytes) => new TextDecoder().decode(bytes);
  for (const [number, value] of fields(new Uint8Array(buffer))) {
    if (number !== METADATA_PROPS) continue;
    const entry = Object.fromEntries(fields(value));
    if (text(entry[KEY]) === "opal") return JSON.parse(text(entry[VALUE]));
  }
  throw new Error("model.onnx has no metadata of opal-deploy: copy it to the server again");
}
