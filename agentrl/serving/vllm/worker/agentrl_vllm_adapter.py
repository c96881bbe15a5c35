"""Replacement of adapters in vLLM's workers.

With vLLM's own route (``load_inplace``), every request remembers its adapter's files and reads them again in each step:
a request that is held during an update would restore the old adapter. With this module, requests name an adapter whose
files are not read again, and updates replace its tensors.
"""

from __future__ import annotations

from typing import Any

from vllm.lora.request import LoRARequest


class AdapterExchange:
    """Worker extension with a call that replaces an adapter."""

    model_runner: Any

    def exchange_adapter(self, folder: str, number: int) -> None:
        """Load an adapter in place of an older one; keeps the old one if that fails.

        Args:
            folder: Folder with peft's files.
            number: Number of the adapter, counted by vLLM from 1 in the order of loading.
        """
        request = LoRARequest(lora_name=f"exchanged-{number}", lora_int_id=number, lora_path=folder, load_inplace=True)
        self.model_runner.lora_manager.add_adapter(request)
