"""Ask a model about a picture with OpenAI's client: ask.py MODEL PICTURE QUESTION."""

import base64
import io
import os
import sys
from pathlib import Path

from openai import OpenAI
from tinker_local.client import as_rgb, open_picture

model, file, question = sys.argv[1:]
client = OpenAI(
    base_url=os.environ.get("TINKER_BASE_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("TINKER_API_KEY", "tml-local"),
)
# How the model was trained, if its program said so: the order of a message, and the longest side of pictures.
layout = (client.models.retrieve(model).model_extra or {}).get("prompt_layout", {})
picture = as_rgb(open_picture(Path(file).read_bytes()))
if "side" in layout and max(picture.size) > layout["side"]:
    print(f"{file}: shrunk to the {layout['side']} pixels a side that the model was trained with", file=sys.stderr)
    picture.thumbnail((layout["side"], layout["side"]))
png = io.BytesIO()
picture.save(png, "PNG")
url = f"data:image/png;base64,{base64.b64encode(png.getvalue()).decode()}"
content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]
if layout.get("order") == "text-first":
    content.reverse()
reply = client.chat.completions.create(
    model=model, messages=[{"role": "user", "content": content}], temperature=0, max_tokens=8
)
print(reply.choices[0].message.content)
