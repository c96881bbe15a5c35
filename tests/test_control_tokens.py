"""Control tokens of published tokenizers, spelled in text: none of them reaches a service whole."""

from __future__ import annotations

import pytest

from agentrl.message import Message, TextPart, broken_up, broken_up_message, user
from agentrl.message.control_tokens import TokenBreaker

TOKENS = {
    "Llama 2": "<s> </s> <unk> [INST] [/INST] <<SYS>> <</SYS>>",
    "Llama 3": "<|begin_of_text|> <|eot_id|> <|eom_id|> <|start_header_id|> <|end_header_id|> <|python_tag|>",
    "Llama 4": "<|header_start|> <|header_end|> <|eot|> <|eom|> <|python_start|> <|image|> <|finetune_right_pad|>",
    "Qwen": "<|im_start|> <|im_end|> <|endoftext|> <tool_call> </tool_call> <tool_response> <think> </think> "
    "<|vision_start|> <|image_pad|> <tts_pad> <tts_text_bos> <|fim_prefix|> <|repo_name|>",
    "DeepSeek": "<｜begin▁of▁sentence｜> <｜User｜> <｜Assistant｜> <｜tool▁calls▁begin｜> <｜fim▁hole｜> ｜DSML｜ "
    "<|EOT|>",
    "Mistral": "[TOOL_CALLS] [TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CONTENT] [AVAILABLE_TOOLS] [SYSTEM_PROMPT] [ARGS] "
    "[CALL_ID] [THINK] [/THINK] [IMG] [IMG_BREAK] [IMG_END] [PREFIX] [SUFFIX] [MIDDLE] [BEGIN_AUDIO] [AUDIO] "
    "[TRANSCRIBE] [MODEL_SETTINGS] [control_8]",
    "Gemma": "<bos> <eos> <pad> <mask> <start_of_turn> <end_of_turn> <start_of_image> <image_soft_token> <unused99> "
    "<start_function_call> <end_function_response> <escape>",
    "Gemma 4": '<|turn> <turn|> <|channel> <channel|> <|tool_call> <tool_call|> <|"|>',
    "Phi": "<|system|> <|user|> <|assistant|> <|end|> <|im_sep|> <|dummy_0|> <|tool|> <|/tool|>",
    "GLM": "[gMASK] [MASK] [sMASK] <sop> <eop> <|observation|> <|begin_of_image|> <arg_key> "
    "</arg_value> <tool_response>",
    "Kimi": "[BOS] [EOS] [PAD] [UNK] [EOT] <|im_user|> <|im_middle|> <|tool_calls_section_begin|> <|media_pad|>",
    "MiniMax": "]~b] ]~!b[ [e~[ ]!p~[ ]!d~[ <minimax:tool_call> </minimax:tool_call> <beginning_of_sentence> "
    "<end_of_sentence> ]<]image[>[ ]<]start",
    "gpt-oss": "<|start|> <|channel|> <|message|> <|call|> <|return|> <|constrain|>",
    "Command R": "<BOS_TOKEN> <EOP_TOKEN> <|START_OF_TURN_TOKEN|> <|CHATBOT_TOKEN|> <PAD> <UNK> <CLS> <SEP> "
    "<MASK_TOKEN> "
    "<|START_ACTION|>",
    "Granite": "<|start_of_role|> <|end_of_role|> <|tool_call|> <fim_prefix> <filename> <gh_stars> <issue_start> "
    "<empty_output> <reponame>",
    "InternLM": "<eoh> <eoa> <eosys> <|action_start|> <|plugin|> [UNUSED_TOKEN_145] <TOKENS_UNUSED_1>",
    "Hunyuan": "<｜hy_User｜> <｜hy_place▁holder▁no▁2｜> <|startoftext|> <|extra_0|> <answer> </answer> <tool_calls>",
    "Seed-OSS": "<seed:bos> <seed:eos> <seed:tool_call> </seed:think> <seed:cot_budget_reflect>",
    "Step": "<|BOT|> <|EOT|> <｜tool_calls_begin｜> <steptml:invoke>",
    "ERNIE": "<cls> <sep> <mask:1> <response> </response> <tool_output> <|end_of_sentence|>",
    "Nemotron": "<extra_id_0> <extra_id_1> <SPECIAL_10> <TOOLCALL> </TOOLCALL> <AVAILABLE_TOOLS> <TOOL_RESPONSE>",
    "OLMo": "|||IP_ADDRESS||| |||EMAIL_ADDRESS||| <functions> </functions> <function_calls>",
    "Falcon": ">>TITLE<< >>QUESTION<< >>ANSWER<< >>DOMAIN<<",
    "Baichuan": "<reserved_106> <reserved_107> <B_SYS> <C_Q> <C_A>",
    "Yi": "<|Human|> <|System|> <|startoftext|>",
    "LFM2": "<|tool_list_start|> <|tool_response_end|> <image>",
    "Apertus": "<|system_start|> <|assistant_end|> <|inner_prefix|> <|tools_suffix|> <SPECIAL_61>",
    "EXAONE": "[|system|] [|user|] [|assistant|] [|endofturn|] [|tool|]",
    "Jamba": "<|bom|> <|eom|> <documents> <citations> <tool_definitions>",
    "others": "<_user> <_bot> <_end> [unused9] [unused10] <role> </role> <|role_end|> <longcat_user> </longcat_s> "
    "<end_of_utterance> [USER] [BOT] [CLS] [SEP] |ENDOFTEXT| |SPEAKER|",
}


@pytest.mark.parametrize("family", TOKENS)
def test_all_control_tokens_of_a_family_are_broken_up(family: str) -> None:
    for token in TOKENS[family].split():
        for text in (token, f"a{token}b", f"{token}{token}", f"<{token}>", f"[{token}]"):
            assert token not in broken_up(text), token
        assert broken_up(token).replace(" ", "") == token


@pytest.mark.parametrize(
    "text",
    [
        "if a < b and c[i] > 2: return '<span>' + x  # [ok] <b>",
        "<html><body><h1>Shop</h1><p class='x'>1 <= 2</p><a href='#'>[1]</a></body></html>",
        "x = [args, image]; print(x[mask]); y = a[user] | b[0] || c",
        "Vec<String>, map<int, list<T>> >> 3, std::vector<double>, [OK] [x] [Note]",
        "| a | b |\n|---|---|\n| 1 | 2 |",
        ">>> print(1)\n1 << 3",
    ],
)
def test_other_text_is_left_alone(text: str) -> None:
    assert broken_up(text) == text


def test_tokens_of_a_known_tokenizer_are_broken_up_too() -> None:
    break_up = TokenBreaker(["@@END", "@@EN", "~", " "])
    assert break_up("so @@END ~ <|im_end|>") == "so @ @END ~ < |im_end|>"
    assert TokenBreaker()("so @@END") == "so @@END"


def test_messages_of_others_are_broken_up_part_by_part_and_answers_are_left() -> None:
    told = user((TextPart(text="a<|im_end|>"), TextPart(text="@@END")))
    broken = broken_up_message(told, TokenBreaker(["@@END"]))
    assert broken.text == "a< |im_end|>@ @END"
    answer = Message(role="assistant", content="<|im_end|>")
    assert broken_up_message(answer) is answer
