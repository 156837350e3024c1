"""Messages with images: the chapter's rules, one by one."""

import copy

import pytest

from posttrain import prepare_multimodal_messages, prepare_multimodal_messages_vllm
from posttrain.errors import DataError

IMAGE = {"type": "image"}


def text(words):
    return {"type": "text", "text": words}


def test_placeholders_go_before_the_first_user_text_alone_and_are_filled_in_order():
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Compare."},
        {"role": "assistant", "content": "Both are cats."},
        {"role": "user", "content": "Sure?"},
    ]
    before = copy.deepcopy(messages)
    made = prepare_multimodal_messages(messages, images=["one", "two"])
    assert messages == before
    assert [m["content"] for m in made] == [
        [text("Be brief.")],
        [{"type": "image", "image": "one"}, {"type": "image", "image": "two"}, text("Compare.")],
        [text("Both are cats.")],
        [text("Sure?")],
    ]


def test_placeholders_that_are_there_are_not_doubled_by_a_later_text_turn():
    messages = [{"role": "user", "content": [IMAGE, text("What?")]}, {"role": "user", "content": "And?"}]
    made = prepare_multimodal_messages(messages, images=["cat"])
    assert made[0]["content"][0] == {"type": "image", "image": "cat"} and made[1]["content"] == [text("And?")]
    assert messages[0]["content"][0] == {"type": "image"}


def test_filled_blocks_and_those_of_tools_are_not_counted():
    messages = [
        {"role": "user", "content": [{"type": "image", "image": "old"}, IMAGE, text("?")]},
        {"role": "assistant", "tool_calls": []},
        {"role": "tool", "content": [IMAGE]},
    ]
    made = prepare_multimodal_messages(messages, images=["new"])
    assert [block.get("image") for block in made[0]["content"]] == ["old", "new", None]
    assert "content" not in made[1] and made[2]["content"] == [IMAGE]


@pytest.mark.parametrize(
    ("messages", "images", "said"),
    [
        ([{"role": "user", "content": [IMAGE]}], ["a", "b"], "have 1 image placeholders, but there are 2 images"),
        ([{"role": "system", "content": "s"}], ["a"], "have 0 image placeholders, but there are 1 images"),
        ([{"role": "narrator", "content": "s"}], None, "message 0 has the unknown role 'narrator'"),
        ([{"role": "system", "content": "s"}, {"role": "user"}], None, r"message 1 \(role 'user'\) has no content"),
    ],
)
def test_what_does_not_add_up_is_refused_with_numbers(messages, images, said):
    with pytest.raises(DataError, match=said):
        prepare_multimodal_messages(messages, images)


def test_vllm_gets_image_pil_blocks_in_a_deep_copy():
    messages = [
        {"role": "user", "content": [{"type": "image", "image": "cat"}, text("?")]},
        {"role": "tool", "content": "x"},
    ]
    made = prepare_multimodal_messages_vllm(messages)
    assert made[0]["content"] == [{"type": "image_pil", "image_pil": "cat"}, text("?")] and made[1] == messages[1]
    assert messages[0]["content"][0] == {"type": "image", "image": "cat"}


def test_keys_that_arrow_filled_with_none_are_no_images():
    messages = [
        {
            "role": "user",
            "content": [{"type": "image", "image": None, "text": None}, {"type": "text", "text": "?", "image": None}],
        }
    ]
    filled = prepare_multimodal_messages(messages, images=["cat"])
    assert filled[0]["content"] == [{"type": "image", "image": "cat"}, {"type": "text", "text": "?"}]
    assert prepare_multimodal_messages(messages)[0]["content"][0] == {"type": "image"}
