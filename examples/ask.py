"""Ask a model about a picture with OpenAI's client: ask.py MODEL PICTURE QUESTION."""

import base64
import mimetypes
import os
import sys
from pathlib import Path

from openai import OpenAI

model, picture, question = sys.argv[1:]
data = base64.b64encode(Path(picture).read_bytes()).decode()
url = f"data:{mimetypes.guess_type(picture)[0]};base64,{data}"
content = [{"type": "text", "text": question}, {"type": "image_url", "image_url": {"url": url}}]
client = OpenAI(
    base_url=os.environ.get("TINKER_BASE_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("TINKER_API_KEY", "tml-local"),
)
reply = client.chat.completions.create(
    model=model, messages=[{"role": "user", "content": content}], temperature=0, max_tokens=8
)
print(reply.choices[0].message.content)
