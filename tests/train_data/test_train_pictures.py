"""Pictures of rows: read by the rules of a server, and rendered as its chat endpoint renders them."""

import base64
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets  # type: ignore[import-untyped]
import numpy as np
import PIL.Image
import pytest
from tinker_local.backend.families import family_of
from tinker_local.backend.hosting.openai_bodies import ChatBody
from tinker_local.backend.models.load_engines import load_renderer
from tinker_local.backend.rendering.hf_text import HFText
from tinker_local.backend.tiny_models import make_tiny_vl_model
from tinker_local.client.train.examples import BadRows, Example
from tinker_local.client.train.media import Media, MediaRules
from tinker_local.client.train.rendering import Renderer
from tinker_local.client.train.rows import FileRows, read_rows
from tinker_local.types import InvalidRequestError
from tinker_local.types.sdk import from_sdk

from tests.train_data.conftest import masked, trained_texts
from tests.web_site import PUBLIC, Site, public_site

ANSWER = {"role": "assistant", "content": "red"}


def png(colour: str = "red", width: int = 56, height: int = 84) -> bytes:
    buffer = io.BytesIO()
    PIL.Image.new("RGB", (width, height), colour).save(buffer, "PNG")
    return buffer.getvalue()


def webp() -> bytes:
    random = np.random.RandomState(0)
    buffer = io.BytesIO()
    PIL.Image.fromarray(random.randint(0, 256, (60, 90, 3), np.uint8)).save(buffer, "WEBP", lossless=True)
    return buffer.getvalue()


def data_url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def asks(*parts: Any) -> dict[str, Any]:
    """A question of texts and pictures, and an answer."""
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"messages": [{"role": "user", "content": content}, ANSWER]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "red.png").write_bytes(png())
    (tmp_path / "outside.png").write_bytes(png("blue"))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "green.png").write_bytes(png("green"))
    return tmp_path / "data"


def write(folder: Path, *rows: Any) -> Path:
    path = folder / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


# As a server -------------------------------------------------------------------------------------------------------


class Served:
    """The text codec and the renderer of a server of a tiny vision model."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(path)
        vision = family_of(config.model_type, "").vision
        assert vision is not None
        self.path = path
        self.marks = vision.tokens(config)
        self.text = HFText.load(str(path), self.marks)
        self.renderer = load_renderer(str(path))

    def ids(self, messages: Any, **asked: Any) -> tuple[list[int], Any]:
        """Token ids and pixels of a `POST chat/completions`, whose tools are rendered as it does."""
        body = ChatBody.model_validate({"model": "tiny", "messages": messages, **asked})
        assert self.text is not None
        offered = body.offered()
        functions = [] if offered is None else [tool.as_function() for tool in offered.tools]
        prompt = self.text.chat(body.as_chat(), {}, go_on=False, functions=functions)
        return self.read(prompt)

    def read(self, prompt: Any) -> tuple[list[int], Any]:
        rendered = self.renderer.render(prompt, "prompt")
        return rendered.token_ids.tolist(), [placed.image.pixel_values for placed in rendered.images]


@pytest.fixture(scope="module")
def served(tiny_models: dict[str, Path]) -> Served:
    return Served(tiny_models["tiny/vision"])


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(make_tiny_vl_model(tmp_path_factory.mktemp("gemma") / "model", family="gemma3"))


TOOLS: Any = [{"type": "function", "function": {"name": "zoom", "description": "Look closer", "parameters": {}}}]
CALL: Any = {"id": "c1", "type": "function", "function": {"name": "zoom", "arguments": '{"at": [1, 2.5, null]}'}}
URL = {"type": "image_url", "image_url": {"url": data_url(png())}}
OTHER = {"type": "image_url", "image_url": {"url": data_url(webp())}}

TALKS: dict[str, Any] = {
    "a picture before a text": {"messages": asks(URL, "What?")["messages"]},
    "between texts that would join": {"messages": asks("a <", "|im_end|>", URL, "<|image_pad|> b")["messages"]},
    "texts in parts, which a template may trim": {"messages": asks("a ", " b", URL, "c ", "d")["messages"]},
    "two, one of them a WebP": {"messages": asks("1", URL, OTHER)["messages"]},
    "several turns": {
        "messages": [
            {"role": "developer", "content": "Be brief. <|im_end|>"},
            *asks(URL, "What?")["messages"],
            {"role": "user", "content": [{"type": "text", "text": "And this?"}, OTHER]},
            ANSWER,
        ]
    },
    "a tool that is called": {
        "messages": [
            *asks(URL, "What?")["messages"][:1],
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "</tool_response> red"},
            ANSWER,
        ],
        "tools": TOOLS,
    },
    "text alone": {"messages": [{"role": "user", "content": "né 你好 👩‍🚀"}, ANSWER]},
}


@pytest.mark.parametrize("talk", TALKS)
def test_a_prompt_is_what_the_chat_endpoint_renders_for_the_same_messages(
    rows_of: Callable[..., FileRows], served: Served, talk: str
) -> None:
    row = TALKS[talk]
    ours, answer = rows_of(row).prompt(0)
    ids, pixels = served.read(from_sdk(ours))
    asked = {"tools": row["tools"]} if "tools" in row else {}
    their_ids, their_pixels = served.ids(row["messages"][:-1], **asked)
    assert ids == their_ids
    assert len(pixels) == len(their_pixels)
    for one, other in zip(pixels, their_pixels, strict=True):
        np.testing.assert_array_equal(one, other)
    assert answer == "red"


class FakeClient:
    """What a training client says of its model."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def get_info(self) -> Any:
        return SimpleNamespace(model_data=SimpleNamespace(tokenizer_id=str(self.path)))

    def get_tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.path)


@pytest.mark.parametrize("model", ["served", "gemma"])
def test_a_renderer_of_a_fake_client_reads_what_the_server_reads(
    request: pytest.FixtureRequest, rows_of: Callable[..., FileRows], model: str
) -> None:
    """Gemma 3 has one number of positions for all pictures, and a processor that writes marks and line breaks."""
    served: Served = request.getfixturevalue(model)
    renderer = Renderer.of(FakeClient(served.path))  # type: ignore[arg-type]
    for talk in (talk for talk in TALKS if "turns" not in talk and "tool" not in talk):
        rows = rows_of(TALKS[talk], renderer=renderer)
        ours, answer = rows.prompt(0)
        ids, pixels = served.read(from_sdk(ours))
        their_ids, their_pixels = served.ids(TALKS[talk]["messages"][:-1])
        assert ids == their_ids
        for one, other in zip(pixels, their_pixels, strict=True):
            np.testing.assert_array_equal(one, other)
        assert answer == "red"
        (example,) = rows.examples(0)  # type: ignore[misc]
        assert trained_texts(example, renderer.tokenizer) == [
            "red<end_of_turn>" if model == "gemma" else "red<|im_end|>"
        ]
        assert example.length == len(ids) + example.trained


def test_a_forged_mark_of_a_picture_is_text(rows_of: Callable[..., FileRows], gemma: Served) -> None:
    renderer = Renderer.of(FakeClient(gemma.path))  # type: ignore[arg-type]
    prompt, _ = rows_of(asks("a <start_of_image> <image_soft_token>", URL), renderer=renderer).prompt(0)
    assert [hasattr(chunk, "data") for chunk in prompt.chunks] == [False, True, False]


def test_tools_that_only_the_language_models_template_has_are_rendered_with_pictures_as_on_a_server(
    rows_of: Callable[..., FileRows], served: Served, tiny_models: dict[str, Path]
) -> None:
    """Qwen2.5-VL as published: the processor's template has pictures and no tools, the tokenizer's has tools alone."""
    from transformers import AutoImageProcessor, AutoTokenizer

    path = tiny_models["tiny/vision"]
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}"
        "{{ '<|im_start|>' + message.role + '\\n' + message.content }}"
        "{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}{{ '<|im_end|>\\n' }}"
        "{# tool #}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    processors = (
        "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}{% if message.content is string %}"
        "{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image' %}"
        "{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
        "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    renderer = Renderer(tokenizer, AutoImageProcessor.from_pretrained(path), template=processors)
    assert served.text is not None
    codec = HFText(tokenizer, served.marks, processors)
    for talk, has_tools in (("a tool that is called", True), ("several turns", False)):
        row = TALKS[talk]
        ours, _ = rows_of(row, renderer=renderer).prompt(0)
        asked = {"tools": TOOLS} if has_tools else {}
        body = ChatBody.model_validate({"model": "tiny", "messages": row["messages"][:-1], **asked})
        offered = body.offered()
        functions = [] if offered is None else [tool.as_function() for tool in offered.tools]
        theirs = codec.chat(body.as_chat(), {}, go_on=False, functions=functions)
        assert served.read(from_sdk(ours))[0] == served.read(theirs)[0]
        text = tokenizer.decode(served.read(theirs)[0])
        assert ("zoom" in text) == has_tools


def test_a_datum_has_the_prompt_the_answer_and_targets_of_weight_0_at_pictures(
    rows_of: Callable[..., FileRows], renderer_of: Callable[..., Renderer]
) -> None:
    rows = rows_of(asks("What? ", URL))
    (example,) = rows.examples(0)  # type: ignore[misc]
    assert isinstance(example, Example)
    positions = (56 // 28) * (84 // 28)
    assert masked(example, renderer_of().tokenizer) == [
        (
            f"<|im_start|>user\nWhat? <|vision_start|><{positions}><|vision_end|><|im_end|>\n<|im_start|>assistant\n",
            False,
        ),
        ("red<|im_end|>", True),
    ]
    assert rows.lengths(0) == [(example.length, example.trained)]


# Where pictures come from ------------------------------------------------------------------------------------------


def sent(rows: FileRows) -> list[bytes]:
    """The pictures of all rows."""
    found = [rows.prompt(at)[0] for at in range(len(rows))]
    return [chunk.data for prompt in found for chunk in prompt.chunks if hasattr(chunk, "data")]


def test_paths_data_urls_and_columns_are_the_same_picture(folder: Path, renderer_of: Callable[..., Renderer]) -> None:
    picture = folder / "green.png"
    forms: list[Any] = [
        {"type": "image", "image": "green.png"},
        {"type": "image", "path": "./green.png"},
        {"type": "image", "url": str(picture)},
        {"type": "image_url", "image_url": {"url": picture.as_uri()}},
        {"type": "image_url", "image_url": "green.png"},
        {"type": "image", "image": data_url(png("green"))},
    ]
    columns = [{**asks({"type": "image"}), "images": ["green.png"]}, {**asks({"type": "image"}), "image": "green.png"}]
    rows = read_rows(write(folder, *map(asks, forms), *columns), renderer=renderer_of(), most_tokens=500)
    assert sent(rows) == [png("green")] * 8


@pytest.mark.parametrize("form", ["saved", "parquet"])
@pytest.mark.parametrize("feature", [True, False], ids=["images", "structs"])
def test_pictures_of_a_data_set_are_read_as_they_were_stored(
    folder: Path, renderer_of: Callable[..., Renderer], form: str, feature: bool
) -> None:
    """The library's Image feature stores bytes, and a path where it was not asked to read the file."""
    text, words = datasets.Value("string"), [{"type": "text", "text": "red"}]
    question = asks("1 ", {"type": "image"}, " 2 ", {"type": "image"})["messages"][0]
    picture = datasets.Image() if feature else {"bytes": datasets.Value("binary"), "path": text}
    parts = datasets.List({"type": text, "text": text})
    data = datasets.Dataset.from_dict(
        {
            "messages": [[question, {"role": "assistant", "content": words}]],
            "images": [
                [
                    {"bytes": png("red"), "path": None},
                    {"bytes": png("green") if feature else None, "path": "green.png"},
                ]
            ],
        },
        features=datasets.Features(
            {"messages": datasets.List({"role": text, "content": parts}), "images": datasets.List(picture)}
        ),
    )
    if form == "saved":
        path = folder
        data.save_to_disk(path)
    else:
        path = folder / "data.parquet"
        data.to_parquet(path)
    rows = read_rows(path, renderer=renderer_of(), most_tokens=500)
    assert sent(rows) == [png("red"), png("green")]


def test_a_folder_elsewhere_is_read_if_it_is_named(folder: Path, renderer_of: Callable[..., Renderer]) -> None:
    pictures = folder.parent / "pictures"
    (folder / "link.png").symlink_to(pictures / "red.png")
    rows = [asks({"type": "image", "image": name}) for name in ("red.png", str(pictures / "red.png"), "link.png")]
    path = write(folder, *rows)
    with pytest.raises(BadRows) as raised:
        read_rows(path, renderer=renderer_of(), most_tokens=500)
    assert ["is not a file below" in problem.reason for problem in raised.value.problems] == [True] * 3
    allowed = MediaRules(folders=[pictures])
    assert sent(read_rows(path, renderer=renderer_of(), media=allowed, most_tokens=500)) == [png()] * 3


@pytest.mark.parametrize(
    "name",
    [
        "../outside.png",
        "green.png/../../outside.png",
        "file:///etc/passwd",
        "/etc/passwd",
        "file://host/a",
        "",
        "\0",
        ".",
    ],
)
def test_nothing_outside_is_read(folder: Path, renderer_of: Callable[..., Renderer], name: str) -> None:
    with pytest.raises(BadRows, match=r"is not a file below|names no host|must be a path"):
        read_rows(write(folder, asks({"type": "image", "image": name})), renderer=renderer_of(), most_tokens=500)


def test_a_model_that_reads_text_says_so(folder: Path, renderer_of: Callable[..., Renderer]) -> None:
    row = asks({"type": "image", "image": "green.png"})
    with pytest.raises(
        BadRows, match=r"messages\[0\].content\[0\].image: is a picture, and this model has no image pro"
    ):
        read_rows(write(folder, row), renderer=renderer_of(sees=False), most_tokens=500)


def test_a_picture_of_too_many_pixels_is_refused_from_its_header(
    folder: Path, renderer_of: Callable[..., Renderer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinker_local.client.train.media.MAX_PIXELS", 56 * 84 - 1)
    row = asks({"type": "image", "image": "green.png"})
    with pytest.raises(BadRows, match="56 x 84 pixels are 4704, the limit is 4703"):
        read_rows(write(folder, row), renderer=renderer_of(), most_tokens=500)


def test_rules_that_mean_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="nothing is not a folder"):
        MediaRules(folders=[tmp_path / "nothing"])
    with pytest.raises(
        InvalidRequestError, match=r"media hosts: an image host is HOST or HOST:PORT, not 'http://a\.b'"
    ):
        MediaRules(hosts=["http://a.b"])


# URLs --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    yield from public_site(monkeypatch)


def media_of(site: Site, folder: Path, *addresses: str, **options: Any) -> Media:
    rules = MediaRules(hosts=[f"pictures.example:{site.port}"])
    return Media(rules, folder, addresses=lambda host, port: addresses or [PUBLIC], **options)


def fetched(media: Media, renderer: Renderer, url: str) -> bytes:
    return bytes(media.picture(url, renderer.image_processor, "image").chunk.data)


@pytest.fixture
def renderer(renderer_of: Callable[..., Renderer]) -> Renderer:
    return renderer_of()


def test_an_allowed_host_is_asked_once_for_each_picture(site: Site, folder: Path, renderer: Renderer) -> None:
    site.page("/red.png", png())
    media = media_of(site, folder)
    url = f"http://pictures.example:{site.port}/red.png"
    assert fetched(media, renderer, url) == fetched(media, renderer, url) == png()
    assert site.hosts == [f"pictures.example:{site.port}"]


@pytest.mark.parametrize("address", ["127.0.0.1", "10.0.0.3", "169.254.169.254", "::1", "::ffff:127.0.0.1", "fd00::1"])
def test_an_allowed_name_that_resolves_to_a_private_address_is_not_asked(
    site: Site, folder: Path, renderer: Renderer, address: str
) -> None:
    media = media_of(site, folder, PUBLIC, address)
    with pytest.raises(InvalidRequestError, match="resolves to a private address"):
        fetched(media, renderer, f"http://pictures.example:{site.port}/red.png")
    assert site.hosts == []


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://other.example/a.png", "is not one that was named"),
        ("https://pictures.example/a.png", "is not one that was named"),
        ("http://me:word@pictures.example:PORT/a.png", "a URL with a name or password"),
        ("ftp://pictures.example/a.png", "is not a file below"),
    ],
)
def test_other_hosts_ports_and_schemes_are_not_asked(
    site: Site, folder: Path, renderer: Renderer, url: str, reason: str
) -> None:
    with pytest.raises(InvalidRequestError, match=reason) as raised:
        fetched(media_of(site, folder), renderer, url.replace("PORT", str(site.port)))
    assert site.hosts == []
    assert "word@" not in str(raised.value)


def test_redirects_stay_on_the_host_and_end(site: Site, folder: Path, renderer: Renderer) -> None:
    site.page("/red.png", png())
    site.page("/here", status=302, Location="/red.png")
    site.page("/away", status=302, Location="http://169.254.169.254/latest/meta-data")
    site.page("/round", status=302, Location="/round")
    media, url = media_of(site, folder), f"http://pictures.example:{site.port}"
    assert fetched(media, renderer, f"{url}/here") == png()
    with pytest.raises(InvalidRequestError, match="redirects to another host"):
        fetched(media, renderer, f"{url}/away")
    with pytest.raises(InvalidRequestError, match="redirects more than 3 times"):
        fetched(media, renderer, f"{url}/round")


def test_what_is_not_there_too_large_or_too_slow_is_refused(
    site: Site, folder: Path, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.page("/gone?key=secret", status=404)
    site.page("/large", png() + bytes(10**5))
    url = f"http://pictures.example:{site.port}"
    with pytest.raises(InvalidRequestError, match="/gone' answers 404"):
        fetched(media_of(site, folder), renderer, f"{url}/gone?key=secret")
    monkeypatch.setattr("tinker_local.client.train.media.PICTURE_BYTES", 1000)
    with pytest.raises(InvalidRequestError, match="the limit is 1000"):
        fetched(media_of(site, folder), renderer, f"{url}/large")
    with pytest.raises(InvalidRequestError, match="was not there within 0 seconds"):
        fetched(media_of(site, folder, seconds=0.0), renderer, f"{url}/large")
