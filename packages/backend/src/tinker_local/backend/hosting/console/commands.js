// How to use a checkpoint: what to type for each kind.

import { hasKey } from "./api.js";
import { command, h } from "./dom.js";

/** A word as a POSIX shell reads it back. */
export function quoted(word) {
  return /^[\w./:@%+=-]+$/.test(word) ? word : `'${word.replaceAll("'", `'\\''`)}'`;
}

/** A string as Python reads it back: JSON's escapes are Python's, too. */
function python(text) {
  return JSON.stringify(text);
}

function address() {
  return new URL(".", location.href).href.replace(/\/$/, "");
}

function folderOf(path) {
  const name = path.split("/").at(-1).replaceAll(/[^\w.-]+/g, "-");
  return /^[-.]/.test(name) ? `my-${name}` : name;
}

const CONNECT = () => `import tinker_local.client as tinker\n\nservice = tinker.ServiceClient(base_url=${python(address())})\n`;

const EXPORT = "Export for PEFT, also --to vllm or merged; on the server's machine, with its --data-dir if it has one";

/** Each with a title: [[what, text], ...]. */
export function commandsOf(checkpoint) {
  const path = checkpoint.tinker_path;
  const exported = [EXPORT, `tinker-local export ${quoted(path)} ${quoted(`${folderOf(path)}-peft`)} --to peft`];
  const deleted = [
    "Delete it in Python",
    `${CONNECT()}service.create_rest_client().delete_checkpoint_from_tinker_path(${python(path)}).result()`,
  ];
  if (checkpoint.checkpoint_type === "training") {
    return [
      [
        "Continue training, with the optimizer's state",
        `${CONNECT()}run = service.create_training_client_from_state_with_optimizer(${python(path)}).result()`,
      ],
      [
        "Make a sampler version of it, which can be sampled",
        `${CONNECT()}run = service.create_training_client_from_state(${python(path)}).result()\n` +
          `print(run.save_weights_for_sampler(${python(path.split("/").at(-1))}).result().path)`,
      ],
      exported,
      deleted,
    ];
  }
  if (checkpoint.checkpoint_type === "sampler") {
    const key = hasKey() ? 'os.environ["TINKER_API_KEY"]' : '"tml-local"';
    return [
      ["Chat in a terminal", `tinker-local chat ${quoted(path)} --url ${quoted(address())}`],
      [
        "Sample in Python",
        `${CONNECT()}tinker.use_served_names(base_url=${python(address())})  # for the tokenizer\n` +
          `sampler = service.create_sampling_client(model_path=${python(path)}).result()\n` +
          `tokenizer = sampler.get_tokenizer()\n` +
          `prompt = tinker.ModelInput.from_ints(tokenizer.encode("Hello"))\n` +
          `reply = sampler.sample(prompt, 1, tinker.SamplingParams(max_tokens=64)).result()\n` +
          `print(tokenizer.decode(reply.sequences[0].tokens))`,
      ],
      [
        "Any client of OpenAI's API",
        `${hasKey() ? "import os\n\n" : ""}from openai import OpenAI\n\n` +
          `client = OpenAI(base_url=${python(`${address()}/v1`)}, api_key=${key})\n` +
          `messages = [{"role": "user", "content": "Hello"}]\n` +
          `print(client.chat.completions.create(model=${python(path)}, messages=messages).choices[0].message.content)`,
      ],
      exported,
      deleted,
    ];
  }
  return [deleted];
}

export function commandList(checkpoint) {
  return h("div", { class: "commands" }, commandsOf(checkpoint).map(([what, text]) => command(what, text)));
}
