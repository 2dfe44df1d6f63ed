"""Your own model, data and reward: replace the three marked lines."""

from areal_ray import Completion, Config, Prompt, train
from areal_ray.config import GenerationConfig, ModelConfig


def reward(prompt: Prompt, completion: Completion) -> float:  # 1. what is good
    return float(prompt.answer in completion.text)


questions = [  # 2. what to ask
    Prompt(text=f"{a} times {b} is", answer=str(a * b)) for a in range(10) for b in range(10)
]
config = Config(
    name="own-task",
    model=ModelConfig(path="Qwen/Qwen2.5-0.5B-Instruct"),  # 3. a directory or a hub name
    generation=GenerationConfig(max_new_tokens=64),
)

if __name__ == "__main__":
    print(train(config, prompts=questions, reward=reward).summary())
