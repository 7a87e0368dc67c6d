"""What of a completion is its answer, where a model thinks aloud between tags first."""

import re


def answer_part(completion: str) -> str:
    """What stands in the last `<answer>…</answer>`, else behind the last `</think>`, else all.

    Thinking that never ends has no answer, and an answer that the length has cut off counts as far as it goes:

        >>> answer_part("<think>2 + 2 is 4.</think><answer> 4 </answer>")
        '4'
        >>> answer_part("2 + 2 is 4.</think>The answer is 4.")  # the prompt has opened the thinking
        'The answer is 4.'
        >>> answer_part("<think>2 + 2 is")
        ''
    """
    behind = completion.rpartition("</think>")[2]
    answers = re.findall(r"<answer>(.*?)(?:</answer>|$)", behind, flags=re.DOTALL)
    if answers:
        return str(answers[-1]).strip()
    return "" if "<think>" in behind else behind.strip()
