"""Written conversations as supervised data, in the same tokens that a rollout of them would have."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tinker
from tinker_local.client.rl.chat import Chat
from tinker_local.client.rl.conversation import Conversation
from tinker_local.client.rl.environment import Message, as_messages
from tinker_local.client.rl.trajectory import Turn, turns_to_data
from tinker_local.types import InvalidRequestError


def conversation_data(
    chat: Chat, messages: Sequence[Mapping[str, Any]], weight: float | Sequence[float] = 1.0
) -> list[tinker.Datum]:
    """A conversation with the assistant's messages as data for "cross_entropy".

    `messages`: {"role": ..., "content": part or parts}; the assistant's are text, thoughts and calls in it as the
    model writes them, and are trained as the template writes them, with its end of turn. `weight`: of every token of a
    reply, one number or one per reply; 0 leaves a reply out. One datum where the chat template appends, one per reply
    where it rewrites.

    Raises InvalidRequestError if a reply is not text alone (tool_calls, reasoning_content beside it), if its thoughts
    do not fit the template's generation prompt, or if no message is before it.
    """
    turns: list[Turn] = []
    conversation: Conversation | None = None
    unseen: list[Message] = []
    for index, message in enumerate(as_messages(list(messages), where="messages")):
        if message.role != "assistant":
            unseen.append(message)
            continue
        if not unseen:
            raise InvalidRequestError(f"messages[{index}]: a reply follows a message of somebody else")
        if conversation is None:
            conversation = Conversation(chat, unseen)
        else:
            conversation.observe(unseen)
        unseen = []
        tokens = _tokens(conversation, message, index)
        turn = Turn(conversation.prompt, tokens, np.zeros(len(tokens), np.float32), "", "stop", "")
        turns.append(turn)
        conversation.reply(tokens)
    return turns_to_data(turns, weight, "cross_entropy")


def _tokens(conversation: Conversation, message: Message, index: int) -> tuple[int, ...]:
    if not all(isinstance(part, str) for part in message.parts):
        raise InvalidRequestError(f"messages[{index}]: the assistant's messages are text")
    if lost := [key for key, value in message.further.items() if value]:
        raise InvalidRequestError(
            f"messages[{index}]: {', '.join(lost)}: a reply is trained as the text that the model writes; write calls "
            "and thoughts into content as the model does"
        )
    text = "".join(str(part) for part in message.parts)
    try:
        return tuple(conversation.write(text))
    except InvalidRequestError as error:
        raise type(error)(f"messages[{index}]: {error}") from error
