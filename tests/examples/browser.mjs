// Opens a page, gives it files, and prints as JSON what it shows first and after each step ["input" or "drop", FILE, ...],
// which requests it made, and whether it could send one to another host.
import { chromium } from "playwright-core";
const { url, steps, executablePath } = JSON.parse(process.argv[1]);
const browser = await chromium.launch({ executablePath, args: ["--no-sandbox"] });
const page = await browser.newPage(), requests = [], shown = [];
page.on("request", (request) => requests.push(`${request.method()} ${request.url()}`));
async function look() {
  await page.waitForFunction(() => /^error| s$|^Drop/.test(document.getElementById("status").textContent));
  await page.fill("#threshold", "0.01");
  const drawing = await page.evaluate(() => document.getElementById("drawing").toDataURL());
  shown.push({ status: await page.textContent("#status"), found: await page.textContent("#found"), drawing });
}
await page.goto(url);
await look();
for (const [how, ...files] of steps) {
  await page.evaluate((how) => {
    document.getElementById("status").textContent = "";
    addEventListener("change", (event) => {
      if (how === "input") return;
      event.stopImmediatePropagation();
      const dataTransfer = new DataTransfer();
      for (const file of event.target.files) dataTransfer.items.add(file);
      dispatchEvent(new DragEvent("drop", { dataTransfer }));
    }, { capture: true, once: true });
  }, how);
  await page.setInputFiles("#files", files);
  await look();
}
const send = (url) => fetch(url, { mode: "no-cors" }).then(() => true, () => false);
const sent = await page.evaluate(send, url.replace("127.0.0.1", "localhost"));
console.log(JSON.stringify([shown, requests, sent]));
await browser.close();
