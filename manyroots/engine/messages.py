from manyroots.messages import *  # noqa
from manyroots.messages import Abort, Batch, EngineInfo, FinishReason, Output, Stats, Submit  # noqa
