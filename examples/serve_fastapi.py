"""Serve a detector over HTTP: POST a photo to /detect to get its detections as JSON, in COCO's results format.

Example:
    python examples/serve_fastapi.py output/vil_tiny --port 8000
    curl --data-binary @photo.jpg http://127.0.0.1:8000/detect
"""

import argparse
import asyncio
import io
import sys
from concurrent.futures import ThreadPoolExecutor

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from PIL import Image
from starlette.requests import ClientDisconnect

from backbones import ConfigError
from projects_vil import Detector

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("detector", help="detector, as for Detector.load")
# Bytes and pixels of a photo, seconds of a request, requests at once.
limits = {"bytes": 10_000_000, "pixels": 25_000_000, "seconds": 30, "requests": 8}
for name, default in {"port": 8000, **limits}.items():
    parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
args = parser.parse_args()
try:
    detector = Detector.load(args.detector)
except ConfigError as error:
    sys.exit(f"error: {error}")
Image.MAX_IMAGE_PIXELS = None  # --pixels is the limit
app, requests, worker = FastAPI(), asyncio.Semaphore(args.requests), ThreadPoolExecutor(1)


@app.post("/detect")
async def answer(request: Request) -> dict:
    if requests.locked():
        raise HTTPException(503, f"{args.requests} requests are being served", {"Retry-After": "1"})
    async with requests:
        try:
            return await asyncio.wait_for(read_and_detect(request), args.seconds)
        except (asyncio.TimeoutError, ClientDisconnect) as error:
            raise HTTPException(503, f"not finished in {args.seconds} s", {"Retry-After": "1"}) from error


async def read_and_detect(request: Request) -> dict:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > args.bytes:
            raise HTTPException(413, f"more than {args.bytes} bytes")
    return await asyncio.get_running_loop().run_in_executor(worker, detect, body)


def detect(body: bytes) -> dict:
    try:
        photo = Image.open(io.BytesIO(body), formats=("JPEG", "PNG", "WEBP"))
    except OSError as error:
        raise HTTPException(415, "not a JPEG, PNG or WebP image") from error
    if photo.width * photo.height > args.pixels:
        raise HTTPException(413, f"{photo.width} x {photo.height}, more than {args.pixels} pixels")
    try:
        detections = detector(photo)
    except ConfigError as error:  # damaged, or its size is not supported
        raise HTTPException(422, str(error)) from error
    named = [item | {"name": name} for item, name in zip(detections.to_coco(0), detections.names, strict=True)]
    return dict(zip(("height", "width"), detections.image_size, strict=True)) | {"detections": named}


uvicorn.run(app, port=args.port)
