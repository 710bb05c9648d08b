// Run an exported detector in the browser: open index.html?model=URL[&photo=URL], or drop both on the page.
import * as ort from "./node_modules/onnxruntime-web/dist/ort.wasm.min.mjs";

ort.env.wasm.numThreads = 1; // more threads need a server that sends COOP and COEP headers
ort.env.wasm.proxy = true; // in a worker, so that the page stays responsive

// The color-blind safe palette of Okabe and Ito.
const COLORS = [[230, 159, 0], [86, 180, 233], [0, 158, 115], [240, 228, 66], [213, 94, 0], [204, 121, 167]];
const element = (id) => document.getElementById(id);
const showStatus = (text) => (element("status").textContent = text);
let session, metadata, photo, found;

async function loadModel(bytes, description) {
  if (description.format !== "onnx" || description.input?.size !== null)
    throw new Error("this page runs ONNX files for any image size: export with --format onnx, without --image-size");
  showStatus("Loading the detector ...");
  session = await ort.InferenceSession.create(new Uint8Array(bytes));
  metadata = description;
}

/** Pillow's BILINEAR along the second axis, which becomes the first: (height, width, 3) -> (size, height, 3). */
function resizeAndTranspose(pixels, height, width, size) {
  const result = new Uint8Array(size * height * 3);
  const scale = width / size, support = Math.max(scale, 1);
  for (let x = 0; x < size; x++) {
    const center = (x + 0.5) * scale;
    const first = Math.max(Math.floor(center - support + 0.5), 0);
    const last = Math.min(Math.floor(center + support + 0.5), width);
    const weights = Array.from({ length: last - first }, (_, i) => 1 - Math.abs(first + i + 0.5 - center) / support);
    const total = weights.reduce((sum, weight) => sum + weight);
    for (let y = 0; y < height; y++)
      for (let channel = 0; channel < 3; channel++) {
        let sum = total / 2; // rounds
        weights.forEach((weight, i) => (sum += weight * pixels[(y * width + first + i) * 3 + channel]));
        result[(x * height + y) * 3 + channel] = sum / total;
      }
  }
  return result;
}

/** Return the photo as the metadata describe the input: resized, with ordered channels, as planes. */
function prepare() {
  const { width, height } = photo;
  const context = new OffscreenCanvas(width, height).getContext("2d");
  context.drawImage(photo, 0, 0);
  let pixels = context.getImageData(0, 0, width, height).data.filter((_, i) => i % 4 < 3);
  let size = [height, width];
  const { short_side, longest_side } = metadata.resizing;
  if (short_side) {
    const scale = Math.min(short_side / Math.min(...size), longest_side / Math.max(...size));
    size = size.map((side) => Math.floor(scale * side + 0.5));
    pixels = resizeAndTranspose(pixels, height, width, size[1]);
    pixels = resizeAndTranspose(pixels, size[1], height, size[0]);
  }
  const { batched, color_order, dtype, sides } = metadata.input;
  if (Math.min(...size) < sides[0] || Math.max(...size) > sides[1])
    throw new Error(`${size.join(" x ")} pixels, and the model takes sides of ${sides.join(" to ")}`);
  const planes = new { uint8: Uint8Array, float32: Float32Array }[dtype](pixels.length);
  const order = color_order === "RGB" ? [0, 1, 2] : [2, 1, 0];
  pixels.forEach((value, i) => (planes[(order[i % 3] * pixels.length) / 3 + Math.floor(i / 3)] = value));
  return new ort.Tensor(dtype, planes, [...(batched ? [1] : []), 3, ...size]);
}

async function detect() {
  showStatus("Detecting objects ...");
  const start = performance.now(), input = prepare();
  const { boxes, scores, classes, masks } = await session.run({ [metadata.input.name]: input });
  const [height, width] = input.dims.slice(-2), area = masks && masks.dims.at(-1) ** 2;
  const scales = [photo.width / width, photo.height / height]; // to pixels of the photo
  found = Array.from(scores.data, (score, i) => ({
    score,
    index: Number(classes.data[i]),
    box: Array.from(boxes.data.slice(4 * i, 4 * i + 4), (edge, axis) => edge * scales[axis % 2]),
    mask: masks && masks.data.slice(area * i, area * (i + 1)),
  }));
  showStatus(`${metadata.detector} with ${metadata.backbone}: ${((performance.now() - start) / 1000).toFixed(1)} s`);
}

/** Mix a color into the pixels of an object, whose mask covers its box; return their number. */
function fill(image, { box: [left, top, right, bottom], mask }, color) {
  const side = Math.sqrt(mask.length);
  const isInside = (row, column) => Math.min(row, column) >= 0 && Math.max(row, column) < side;
  const at = (row, column) => (isInside(row, column) ? mask[row * side + column] : 0);
  const between = (a, b, part) => a + (b - a) * part;
  let area = 0;
  for (let y = Math.max(Math.floor(top), 0); y < Math.min(bottom, image.height); y++)
    for (let x = Math.max(Math.floor(left), 0); x < Math.min(right, image.width); x++) {
      const v = ((y + 0.5 - top) / (bottom - top)) * side - 0.5, row = Math.floor(v);
      const u = ((x + 0.5 - left) / (right - left)) * side - 0.5, column = Math.floor(u);
      const above = between(at(row, column), at(row, column + 1), u - column);
      const below = between(at(row + 1, column), at(row + 1, column + 1), u - column);
      if (between(above, below, v - row) < metadata.thresholds.mask) continue;
      area++;
      const first = (y * image.width + x) * 4;
      color.forEach((value, channel) => (image.data[first + channel] = (image.data[first + channel] + value) / 2));
    }
  return area;
}

function draw() {
  if (!found) return;
  const lowest = Number(element("threshold").value), canvas = element("drawing"), context = canvas.getContext("2d");
  [canvas.width, canvas.height] = [photo.width, photo.height];
  context.drawImage(photo, 0, 0);
  const image = context.getImageData(0, 0, canvas.width, canvas.height);
  const objects = found.filter(({ score }) => score >= lowest).map((object) => {
    const name = metadata.classes[object.index], color = COLORS[object.index % COLORS.length];
    return { ...object, name, color, area: object.mask && fill(image, object, color) };
  });
  context.putImageData(image, 0, 0);
  const thick = Math.max(1, Math.round(Math.min(canvas.width, canvas.height) / 300));
  Object.assign(context, { lineWidth: thick, font: `${12 * thick}px sans-serif`, textBaseline: "bottom" });
  for (const { score, name, box: [left, top, right, bottom], color } of objects.toReversed()) {
    const label = `${name} ${score.toFixed(2)}`, foot = Math.max(top, 14 * thick);
    context.strokeStyle = context.fillStyle = `rgb(${color})`;
    context.strokeRect(left, top, right - left, bottom - top);
    context.fillRect(left, foot - 14 * thick, context.measureText(label).width, 14 * thick);
    context.fillStyle = "black";
    context.fillText(label, left, foot);
  }
  // Class, score, left, top, right, bottom and, of a mask, the number of pixels.
  element("found").textContent = objects.map(({ score, name, box, area }) =>
    [name, score.toFixed(4), ...box.map((edge) => edge.toFixed(2)), area ?? ""].join("\t").trim()).join("\n");
}

async function use(files) {
  const named = (suffix) => files.find(({ name }) => name.endsWith(suffix));
  const model = named(".onnx"), description = named(".json");
  const image = files.find((file) => file !== model && file !== description);
  if (!model !== !description) throw new Error("drop model.onnx and model.onnx.metadata.json together");
  if (model) await loadModel(await model.arrayBuffer(), JSON.parse(await description.text()));
  if (image) {
    photo = await createImageBitmap(image, { colorSpaceConversion: "none" }).catch(() => {
      throw new Error(`${image.name} is not an image that this browser reads`);
    });
  }
  if (!session) return showStatus("Drop model.onnx and model.onnx.metadata.json here.");
  if (!photo) return showStatus("Drop a photo here.");
  await detect();
  draw();
}

async function download(url) {
  const response = await fetch(url);
  if (!response.ok) throw new Error(`${url}: ${response.status} ${response.statusText}`);
  return new File([await response.blob()], url);
}

// One after the other: files may be dropped while the detector works.
let work = Promise.resolve();
function enqueue(files) {
  work = work.then(async () => use(await files)).catch((error) => showStatus(`error: ${error.message}`));
}

addEventListener("dragover", (event) => event.preventDefault());
addEventListener("drop", (event) => {
  event.preventDefault();
  enqueue([...event.dataTransfer.files]);
});
element("files").addEventListener("change", ({ target }) => enqueue([...target.files]));
element("threshold").addEventListener("input", draw);
const query = new URLSearchParams(location.search), model = query.get("model");
const given = [...(model ? [model, `${model}.metadata.json`] : []), ...query.getAll("photo")];
enqueue(Promise.all(given.map(download)));
