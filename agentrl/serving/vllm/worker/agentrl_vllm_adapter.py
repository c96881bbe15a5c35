"""Exchange of the adapters that vLLM's workers have.

vLLM's own route can do that, too (``load_inplace``). But every request remembers the files of the adapter that it began
with, and then they are read in each step: a request that is held during an update would bring the old adapter back.
Here requests name an adapter that is not to be read again, whose tensors are exchanged.
"""

from __future__ import annotations

from typing import Any

from vllm.lora.request import LoRARequest


class AdapterExchange:
    """A call of the workers."""

    model_runner: Any

    def exchange_adapter(self, folder: str, number: int) -> None:
        """Read an adapter; the old one stays if that fails.

        Args:
            folder: Holds peft's files.
            number: Which one; vLLM counts the adapters that it has been sent from 1.
        """
        request = LoRARequest(lora_name=f"exchanged-{number}", lora_int_id=number, lora_path=folder, load_inplace=True)
        self.model_runner.lora_manager.add_adapter(request)
