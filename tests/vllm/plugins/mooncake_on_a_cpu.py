"""vLLM's connector to Mooncake's store on an engine without an accelerator. Everything is vLLM's and Mooncake's own but the
CUDA event that says that a step has been computed: a CPU engine has computed when it is recorded. Loaded by vLLM through
`kv_connector_module_path`, in the engine's processes."""

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import connector


class Computed:
    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


torch.cuda.Event = Computed


class MooncakeStoreOnACpu(connector.MooncakeStoreConnector):  # type: ignore[misc]
    pass
