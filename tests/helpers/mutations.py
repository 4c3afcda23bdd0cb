"""Faults to plant, each of which a test must notice.

The tests that a fault names must notice it (`tests/helpers/planted_tests.py` runs them). Faults
that name none are for the detector (`tests/helpers/detector.py`), which is made for the decide
half. `old` must occur exactly once in its file. When the code has changed, write the fault anew:
one that no longer applies is an error, not a pass.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutation:
    """One fault."""

    file: str
    """Below the package."""
    old: str
    new: str
    breaks: str
    """What is wrong then."""
    noticed_by: tuple[str, ...] = ()
    """Tests, as `file::test` below `tests`; each of them must fail. None: the detector."""

    @property
    def name(self) -> str:
        return f"{self.file}: {self.breaks}"

    @property
    def module(self) -> str:
        return "manyroots." + self.file.removesuffix(".py").replace("/", ".")

    def applied_to(self, text: str) -> str:
        """The file with the fault in it."""
        count = text.count(self.old)
        if count != 1:
            raise LookupError(
                f"{self.name}: the snippet occurs {count} times; write it anew: {self.old!r}"
            )
        return text.replace(self.old, self.new)


def _cache(file: str, old: str, new: str, breaks: str) -> Mutation:
    return Mutation(f"cache/{file}.py", old, new, breaks)


def _scheduler(old: str, new: str, breaks: str, file: str = "scheduler") -> Mutation:
    return Mutation(f"scheduler/{file}.py", old, new, breaks)


ADAPTERS = "unit/scheduler/test_adapters.py::"
BACKENDS = "unit/store/test_backends.py::"
COMPILES = "unit/kernels/test_compiles_for_gpus.py::test_q01_q04_f07_kernels_compile_for_hopper"
COPY_ENDS = "unit/store/test_copy_ends.py::"
ENDINGS = "unit/scheduler/test_endings.py::"
RUNNER = "unit/runner/test_runner.py::"
SPECULATION = "unit/scheduler/test_speculation.py::"
FAIR = "unit/scheduler/test_fair.py::"
FEW_STATES = "states_come_back_where_the_host_has_fewer_units_than_the_prompt_has_pages"
GRAMMARS = "unit/engine/test_grammar_compiles.py::"
IMPORTANCE = "unit/scheduler/test_priority.py::"
PACK = "unit/scheduler/test_pack.py::"
PROMISES = "unit/engine/test_adapter_promises.py::"
REUSE = "unit/scheduler/test_reuse.py::"
STATE_BURSTS = "unit/scheduler/test_state_bursts.py::"
TIERS = "unit/test_llm_tiers.py::"
DRAFTS = "unit/test_llm_speculation.py::test_v01_answers_are_the_same_with_drafts_of_every_kind"
SLICES = "unit/scheduler/test_slices.py::"
OLDER_STATES = (
    "unit/cache/test_tiers.py::test_t06_older_states_are_asked_for_until_one_is_there[8-6]"
)
WINDOWS = "unit/cache/test_window_eviction.py::"
CONFIGS = "property/test_config_fields.py::"
REAL = "unit/engine/test_real_"
GRAMMAR = "unit/grammar/test_grammar_rows.py::"
ANSWERS = "unit/text/test_chat_output.py::"
RESPONSES = "unit/api/test_responses_route.py::"
MESSAGES = "unit/api/test_messages_route.py::"
CONTROL = "unit/api/test_control_routes.py::"
SHAPES = "unit/api/test_structure_fields.py::"
HABITS = "unit/api/test_other_habits.py::"
KEEP_ALIVE = "unit/api/test_keep_alive.py::"
ORDER = "test_l08_the_order_of_a_policy_holds_across_adapters_and_tenants"
HASHES = "test_n17_plans_and_victims_do_not_depend_on_the_hashes_of_a_process"

MUTATIONS: tuple[Mutation, ...] = (
    # Foreign configs and adapters
    Mutation(
        "models/fields.py",
        "lambda value: value is True,\n",
        "lambda value: type(value) is bool,\n",
        "a model that sees what follows is served as if it did not",
        (f"{CONFIGS}test_f01_each_value_of_a_field_is_transformers_or_refused_by_name",),
    ),
    Mutation(
        "models/weights/safetensors.py",
        "    if (folder / SINGLE_FILE).is_file():\n",
        "    if not (folder / INDEX_FILE).is_file():\n",
        "an index that is left over goes before the file that transformers reads",
        ("unit/models/test_model_loading.py::test_shards_load_as_one_file_does",),
    ),
    Mutation(
        "lora/files/trained.py",
        "if layers is not None and (layer is None or int(layer[1]) not in layers):",
        "if layers is not None and layer is None:",
        "weights of layers that PEFT leaves alone are used",
        (
            "unit/lora/test_adapter_files_refused.py::test_w12_weights_that_peft_would_not_use_are_refused",
        ),
    ),
    Mutation(
        "text/tokenizer_files.py",
        "    _refuse_empty(backend, special, source)\n",
        "",
        "a folder without tokens is served with a tokenizer that knows none",
        ("unit/text/test_tokenizer.py::test_a_folder_that_lost_its_tokens_says_so",),
    ),
    Mutation(
        "models/spec.py",
        '"gelu_new": "gelu_pytorch_tanh"',
        '"gelu_new": "gelu"',
        "an activation of another name is another one",
        ("unit/models/test_model_spec.py::test_activations_go_by_all_their_names",),
    ),
    # Structured output, tools and reasoning
    Mutation(
        "grammar/rows.py",
        "tokens[mine.num_consumed :]",
        "tokens[mine.num_consumed :][:1]",
        "a sequence that comes back begins its grammar anew",
        (f"{GRAMMAR}test_g01_a_sequence_that_comes_back_is_where_it_was",),
    ),
    Mutation(
        "grammar/rows.py",
        "if kept.any() or mine.matcher is None:",
        "if True:",
        "min_tokens leave nothing to choose after a grammar's end",
        (f"{GRAMMAR}test_g01_no_end_before_min_tokens_unless_nothing_else_is_left",),
    ),
    Mutation(
        "grammar/token_rules.py",
        "tuple(output[-len(before) :].tolist()) == before",
        "True",
        "a bad word's last token is forbidden after the last but one alone",
        ("unit/grammar/test_token_rules.py::test_masks_leave_what_no_rule_forbids",),
    ),
    Mutation(
        "runner/masks.py",
        "if sampling.has_token_rules:",
        "if False:",
        "allowed_token_ids and bad_words pass the door and do nothing",
        ("unit/test_llm_token_rules.py::test_allowed_token_ids_are_a_bias_of_all_others_away",),
    ),
    Mutation(
        "grammar/cache.py",
        "self._alive[params] = made",
        "self._alive.pop(params, None)",
        "a grammar that a request holds can't be found",
        (
            "unit/grammar/test_grammar_cache.py::"
            "test_g01_only_so_many_are_kept_and_those_that_are_held",
        ),
    ),
    Mutation(
        "grammar/source.py",
        '"lenient": False',
        '"lenient": True',
        "what a schema says and can't be honoured is left out",
        (
            "unit/grammar/test_source.py::"
            "test_g01_a_schema_is_refused_for_what_it_says_and_cannot_be_honoured",
        ),
    ),
    Mutation(
        "runner/runner.py",
        "self._pending.learn(all_of_them=True)",
        "self._pending.learn()",
        "a mask is made before the token it depends on is known",
        (
            "unit/runner/test_runner.py::"
            "test_g01_masks_are_in_time_for_tokens_that_are_still_on_the_device[grammar1]",
        ),
    ),
    Mutation(
        "text/formats/reader.py",
        "self._hand_on(self._possible_mark(marks, longest), to)",
        "self._hand_on(len(self._text), to)",
        "half a mark is shown",
        (f"{ANSWERS}test_g02_streamed_equals_whole_whatever_the_pieces[one call]",),
    ),
    Mutation(
        "text/formats/thinking.py",
        "return prompt.rstrip().endswith(ends)",
        "return False",
        "reasoning that the prompt begins is shown as the answer",
        (f"{ANSWERS}test_g02_a_recorded_text_means_what_it_says[reasoning begun in the prompt]",),
    ),
    # Endpoints
    Mutation(
        "text/chat_output.py",
        "        if self._must_call:\n            return\n",
        "",
        "of a forced call that is cut short its marks are shown as content",
        (f"{ANSWERS}test_g02_a_forced_call_cut_short_is_never_content[required-one call]",),
    ),
    Mutation(
        "api/checks.py",
        "        if also != params:",
        "        if False:",
        "of two shapes that differ the second is forgotten",
        (
            "unit/api/test_structure_fields.py::test_g01_two_shapes_that_differ_are_refused_by_both_names",
        ),
    ),
    Mutation(
        "api/completions.py",
        "generated = _silenced(generated)",
        "pass",
        "an echo alone says a token more",
        (
            "unit/api/test_completions_route.py::test_an_echo_alone_scores_the_prompt_and_says_nothing[1]",
        ),
    ),
    Mutation(
        "api/logprobs.py",
        "    num_added = max(0, length - len(text))\n",
        "    num_added = 0\n",
        "a tokenizer's first token takes room in an echoed text",
        (
            "unit/api/test_completions_route.py::test_offsets_of_an_echoed_prompt_leave_out_what_a_tokenizer_adds",
        ),
    ),
    Mutation(
        "text/tools.py",
        "parallel is True if kind is ToolChoice.NAMED else parallel is not False",
        "parallel is not False",
        "a named function is called again and again",
        (
            "unit/api/test_structure_fields.py::test_g02_a_named_call_is_one_call_unless_more_are_asked_for",
        ),
    ),
    Mutation(
        "text/chat_messages.py",
        '    return value if isinstance(value, dict) else {"_not_an_object": value}',
        "    return value",
        "a call whose arguments were no object breaks templates that iterate over them",
        ("unit/text/test_chat.py::test_g04_a_chat_goes_on_whatever_its_calls_were[a word]",),
    ),
    Mutation(
        "api/middleware.py",
        'if {b"content-length", b"transfer-encoding"} <= {name for name, _ in headers}:',
        "if False:",
        "of two lengths of a body one is forgotten",
        ("unit/api/test_half_sent.py::test_r03_what_is_no_http_is_told_so_in_json[two lengths]",),
    ),
    Mutation(
        "api/openai_responses/route.py",
        'self._response.status = "incomplete" if is_cut else "completed"',
        'self._response.status = "completed"',
        "a response that was cut off is called whole",
        (f"{RESPONSES}test_g05_an_answer_that_is_cut_off_is_incomplete",),
    ),
    Mutation(
        "api/openai_responses/route.py",
        "        self._num_events += 1\n",
        "",
        "every event of a response has the same number",
        (f"{RESPONSES}test_g05_events_are_numbered_and_named",),
    ),
    Mutation(
        "api/openai_responses/route.py",
        "return self._told([waiting] if self._num_events else [])",
        'return b": waiting\\n\\n"',
        "a response that waits says so in comments, which Codex does not count",
        (f"{KEEP_ALIVE}test_g05_a_response_that_waits_sends_events",),
    ),
    Mutation(
        "api/openai_responses/writer.py",
        "item.input = input_of(self._arguments)",
        "item.input = self._arguments",
        "a custom tool gets JSON instead of the text within",
        (f"{RESPONSES}test_g05_a_custom_tool_is_called_with_a_text",),
    ),
    Mutation(
        "api/events.py",
        "            self._has_ended = not self._has_begun\n",
        "            self._has_ended = True\n",
        "a stream that failed after its headers begins a second response",
        (f"{KEEP_ALIVE}test_g04_an_error_after_the_headers_is_an_event",),
    ),
    Mutation(
        "api/anthropic/tools.py",
        "return [tool for tool in tools if _name(tool) not in removed]",
        "return tools",
        "tools that a conversation took away are offered",
        (f"{MESSAGES}test_g02_a_conversation_changes_its_tools",),
    ),
    Mutation(
        "api/openai_responses/writer.py",
        "call_item.arguments += said.text",
        "call_item.arguments = said.text",
        "a streamed call's arguments are their last piece",
        (f"{RESPONSES}test_g05_the_stream_helper_adds_the_events_up",),
    ),
    Mutation(
        "api/openai_responses/conversion.py",
        'last.setdefault("tool_calls", []).extend(message["tool_calls"])',
        "messages.append(message)",
        "words and calls of one answer are two messages",
        (f"{RESPONSES}test_g05_words_and_calls_of_one_answer_are_one_message",),
    ),
    Mutation(
        "api/anthropic/route.py",
        'self._message.stop_reason = "tool_use"',
        'self._message.stop_reason = "end_turn"',
        "an agent is not told that a tool is called",
        (f"{MESSAGES}test_g05_a_message_calls_tools",),
    ),
    Mutation(
        "api/anthropic/route.py",
        "input_tokens=usage.prompt_tokens - num_cached - num_created,",
        "input_tokens=usage.prompt_tokens - num_created,",
        "tokens that were cached are counted twice",
        (f"{MESSAGES}test_g05_what_was_cached_is_counted_once",),
    ),
    Mutation(
        "api/anthropic/conversion.py",
        "if _is_begun(chat.messages):",
        "if False:",
        "an answer that the caller began is begun anew",
        (f"{MESSAGES}test_g05_an_answer_that_the_caller_began_goes_on",),
    ),
    Mutation(
        "api/anthropic/writer.py",
        '        self._arguments = ""\n        place',
        '        self._arguments += ""\n        place',
        "a second call has the first one's arguments, too",
        (f"{MESSAGES}test_g05_each_of_several_calls_has_its_own_arguments",),
    ),
    Mutation(
        "api/anthropic/writer.py",
        '        if block["type"] == "tool_use":\n',
        "        if False:\n",
        "a whole message's call has no arguments",
        (f"{MESSAGES}test_g05_a_message_calls_tools",),
    ),
    Mutation(
        "api/embeddings.py",
        "return (vector / length).astype(np.float32)",
        "return vector.astype(np.float32)",
        "vectors have the length of their state",
        ("unit/api/test_embeddings_route.py::test_g05_each_text_has_a_vector_of_length_one",),
    ),
    Mutation(
        "api/embeddings.py",
        'vector.astype("<f4").tobytes()',
        'vector.astype("<f8").tobytes()',
        "base64 holds numbers of another width",
        ("unit/api/test_embeddings_route.py::test_g05_vectors_as_base64_and_texts_as_tokens",),
    ),
    Mutation(
        "api/control.py",
        "            if not was_paused and server.num_pauses == num_pauses:\n",
        "            if True:\n",
        "new weights end a pause that another caller began",
        (f"{CONTROL}test_g06_weights_are_updated_in_a_pause",),
    ),
    Mutation(
        "api/control.py",
        "mode = PauseMode.ABORT if body.abort_all_requests else PauseMode.WAIT",
        "mode = PauseMode.ABORT",
        "new weights end requests that no caller asked to end",
        (f"{CONTROL}test_g06_weights_are_updated_in_a_pause",),
    ),
    Mutation(
        "api/app.py",
        "admin_paths=frozenset(endpoint.path for endpoint in known if endpoint.is_admin)",
        "admin_paths=frozenset()",
        "a caller with the API's key may do what an admin may",
        (f"{CONTROL}test_g06_nobody_but_the_admin[/pause]",),
    ),
    Mutation(
        "api/app.py",
        "            *_cors(settings),\n",
        "",
        "no page may call, whatever the operator allows",
        ("unit/api/test_web.py::test_g10_a_page_of_an_allowed_origin_may_call[origins0]",),
    ),
    Mutation(
        "api/app.py",
        "allow_origins=settings.allowed_origins,",
        'allow_origins=("*",),',
        "a page of any origin may call",
        ("unit/api/test_web.py::test_g10_a_page_of_another_origin_may_not[origins1]",),
    ),
    Mutation(
        "api/preprocess.py",
        "            sampling = replace(sampling, structured_outputs=structure)\n        tokens",
        "        tokens",
        "a chat's shape does not reach the engine",
        (f"{SHAPES}test_g02_a_named_call_is_that_tool",),
    ),
    Mutation(
        "api/preprocess.py",
        'if wanted[0] != "response_format":',
        "if True:",
        "agents with a typed result can't force a tool",
        (f"{SHAPES}test_g02_a_forced_call_goes_before_the_shape_of_the_last_answer",),
    ),
    Mutation(
        "grammar/json_schemas.py",
        "    if any(_is_joined(part) for part in _parts(schema)):\n        return dict(schema)\n",
        "",
        "what one part of a schema needs another forbids",
        ("unit/grammar/test_json_schemas.py::test_g01_what_must_stay_open_stays_as_it_is[kept8]",),
    ),
    Mutation(
        "grammar/json_schemas.py",
        'made["additionalProperties"] = False',
        "pass",
        "objects get properties that the schema does not name",
        (
            "unit/grammar/test_json_schemas.py::test_g01_an_object_has_the_properties_that_are_named",
        ),
    ),
    # Namespaces and hashes
    _cache(
        "tree",
        "owner = key.at(depth)",
        "owner = key.at(0)",
        "a page is inserted in the namespace of the first",
    ),
    _cache(
        "tree",
        "if node.owner == key.at(depth):",
        "if True:",
        "an adapter's pages are taken for base's where the tokens are the same",
    ),
    _cache(
        "keys",
        "before.append((Owner(adapter, begin), key.switch_page + 1))",
        "before.append((Owner(base, 0), key.switch_page + 1))",
        "a page with tokens of the adapter counts as base's",
    ),
    _cache(
        "keys",
        "before.append((Owner(adapter, begin), key.switch_page + 1))",
        "before.append((Owner(adapter, 0), key.switch_page + 1))",
        "where in a page an adapter begins is no part of its key",
    ),
    _cache(
        "keys",
        "before.append((Owner(adapter, begin), key.switch_page + 1))",
        "before.append((Owner(adapter, begin), ENDLESS))",
        "pages after an adapter's beginning are taken for such with one",
    ),
    _cache(
        "keys",
        'adapter, salt, struct.pack("<Q", owner.begin))',
        "adapter, salt)",
        "hashes do not say where in a page an adapter begins",
    ),
    _cache(
        "index",
        "begin=node.owner.begin,",
        "begin=0,",
        "events do not say where in a page an adapter begins",
    ),
    _cache(
        "sole",
        "cursor.owner == page[0]:",
        "cursor.namespace == page[0].namespace:",
        "a page in which an adapter begins is continued as if it began in every page",
    ),
    _scheduler(
        "return int(starts[-1]) if len(starts) else NEVER",
        "return int(starts[0]) if len(starts) else NEVER",
        "an adapter begins at the first of its invocations",
        "request",
    ),
    _cache(
        "keys", "blake2b(seed + parent +", "blake2b(parent +", "hashes do not carry the namespace"
    ),
    _cache("keys", "blake2b(seed + parent +", "blake2b(seed +", "hashes do not chain"),
    _cache(
        "keys",
        "framed(_DOMAIN, adapter, salt,",
        "framed(_DOMAIN, adapter,",
        "hashes do not carry the salt",
    ),
    _cache(
        "tree", "starts[upper.serial] = upper", "pass", "a split loses where a namespace begins"
    ),
    _cache(
        "cache",
        "lease.num_allowed_pages = min(lease.num_allowed_pages, allowed)",
        "pass",
        "requests in flight publish into an evicted namespace",
    ),
    _cache(
        "sole",
        "if end > lease.num_allowed_pages:",
        "if True:",
        "nothing is published in the quick way",
    ),
    _cache(
        "cache",
        "allowed = lease.key.first_page_of(namespaces)",
        "allowed = 0",
        "requests in flight publish nothing once any namespace is evicted",
    ),
    _cache(
        "index",
        "for gone in self.tree.cut(node, depth):",
        "for gone in self.tree.cut(node, depth)[1:]:",
        "a part of what is cut stays indexed",
    ),
    _cache(
        "tree",
        "self.first_pages[known] -= 1",
        "pass",
        "a page that has gone is still said to be another's",
    ),
    _cache(
        "tree",
        "return self.first_pages[key.at(0).namespace.salt, page] > 0",
        "return any(page == known for _, known in self.first_pages)",
        "a tenant learns what another has asked",
    ),
    # Families
    _cache(
        "families/window",
        "-(-(self.window - 1) // self.page_size)",
        "-(-(self.window - 2) // self.page_size)",
        "a window resumes with a token too few",
    ),
    _cache(
        "families/window",
        "num_tokens - (self.window - 1)",
        "num_tokens - (self.window - 2)",
        "a page still seen through the window is given back",
    ),
    _cache(
        "families/window",
        "return (seen - 2) // self.page_size + 2",
        "return (seen - 2) // self.page_size + 1",
        "a step is promised room with a page too few",
    ),
    _cache(
        "growth",
        "needs[plane.index] = 0  # each step",
        "pass  # each step",
        "a long prompt needs room in a window's pool for all of its pages at once",
    ),
    _cache(
        "families/recurrent",
        "return present",
        "return present | True",
        "a state is resumed from where none was saved",
    ),
    _cache(
        "matching", "present = [a | b for", "present = [a & b for", "a boundary needs both tiers"
    ),
    _cache(
        "matching",
        "_longest(layout, on_device)",
        "_longest(layout, present)",
        "what is on the host counts as on the device",
    ),
    _cache(
        "matching",
        "if longest < best:",
        "if blocker is None:",
        "the last family that is asked does not count",
    ),
    _cache(
        "holding",
        "tree, max_pages = self._tree, (len(tokens) - 1) // self._page_size",
        "tree, max_pages = self._tree, len(tokens) // self._page_size",
        "no token is left to compute",
    ),
    _cache(
        "states",
        "self._copy(family, saved, unit, is_after_model=False)",
        "pass",
        "the working state is not restored",
    ),
    _cache(
        "states",
        "self._copy(family, lease.states[family], checkpoint.unit, is_after_model=True)",
        "self._copy(family, lease.states[family], checkpoint.unit, is_after_model=False)",
        "a state is saved before its step has run",
    ),
    _cache(
        "growth",
        "num_tokens = min(num_tokens, stop - num_computed)",
        "pass",
        "chunks are not clipped to where a state is wanted",
    ),
    _cache(
        "checkpoints", "last, lease.junction, lease.shared]", "last]", "no state where prompts part"
    ),
    _cache(
        "checkpoints",
        "if num_tokens > lease.num_prompt_tokens:",
        "if num_tokens > lease.num_prompt_tokens + 999:",
        "no state of the output is kept",
    ),
    _cache(
        "cache",
        "checkpoint.step_id <= self.publisher.committed_step",
        "checkpoint.step_id > 0",
        "a state is published although its step has not committed",
    ),
    _cache(
        "states",
        "self.num_skipped += 1",
        "pass",
        "a checkpoint is skipped without a word",
    ),
    # Holding and room
    _cache(
        "pool",
        "held += _ONE",
        "held[:] = 1",
        "a second holder does not count",
    ),
    _cache(
        "pool",
        "self.num_cached += len(orphans) - len(free)",
        "pass",
        "cached units are not counted",
    ),
    _cache(
        "eviction",
        "places = places[holders[units[places]] == 0]",
        "places = places[holders[units[places]] <= 1]",
        "a claimed page is evicted",
    ),
    _cache(
        "sole",
        "node.last_used = self._tick = self._tick + 1",
        "node.last_used = self._tick = self._tick - 1",
        "the most recently used goes first",
    ),
    _cache(
        "publishing",
        "tick = self._tick = self._tick + 1\n        first = end",
        "tick = self._tick = self._tick - 1\n        first = end",
        "the most recently used goes first, of several families",
    ),
    _cache(
        "tree",
        "parent.last_used = max(parent.last_used, *(gone.last_used for gone in removed))",
        "pass",
        "the use of a page is lost with it",
    ),
    _cache(
        "eviction",
        "return self._kept if node.is_fork and self._forks is not None else self._others",
        "return self._others",
        "prompts that come once flush a hot prefix",
    ),
    _cache(
        "tree",
        "if parent.children:\n            parent.is_fork = True",
        "if False:\n            pass",
        "a prefix after which requests part is not kept longer",
    ),
    _cache(
        "publishing",
        "if node.is_repeated:",
        "if False:",
        "a prompt asked again as it is is not kept longer",
    ),
    _cache(
        "publishing",
        "if node.is_repeated:",
        "if True:",
        "a talk's short turn is taken for a prompt asked again",
    ),
    _cache(
        "tree",
        "parent.is_fork = parent.is_fork or any(gone.is_fork for gone in removed)",
        "pass",
        "what led to a shared prefix is not kept once its end has gone",
    ),
    _cache(
        "fork_share",
        "self.share = min(MOST, max(LEAST, share))",
        "self.share = max(LEAST, share)",
        "shared prefixes may fill the pool, and new work can never be cached",
    ),
    _cache(
        "fork_share",
        "self.share = min(MOST, max(LEAST, share))",
        "self.share = min(MOST, max(START, share))",
        "dead shared prefixes keep their room though others need it",
    ),
    _cache(
        "fork_share",
        "while self._num_early_pages > num_kept or len(self.early) > MAX_NAMES:",
        "while len(self.early) > MAX_NAMES:",
        "what LRU would have lost too counts against the share",
    ),
    _cache(
        "eviction",
        "if excess > 0 and kept[:2] < others[:2]:",
        "if False:",
        "shared prefixes go last whatever they fill",
    ),
    _cache(
        "eviction",
        "and not (self._is_ordered and node.below[plane])",
        "",
        "a page is evicted from under others",
    ),
    _cache(
        "growth",
        "return int(np.count_nonzero(held_once))",
        "return len(held_once)",
        "credit for pages that others hold too",
    ),
    _cache(
        "growth",
        "self._drop_behind_window(lease, num_computed)",
        "pass",
        "pages that a window has left are never given back",
    ),
    _cache(
        "holding",
        "(*lease.states.items(), *lease.resumed.items()):\n            self.drop",
        "lease.states.items():\n            self.drop",
        "a release skips the checkpoint it resumed from",
    ),
    _cache(
        "cache",
        "self.index.pools[plane_index].drop(duplicates)",
        "pass",
        "a release skips the copies it holds",
    ),
    _cache(
        "cache",
        "self._holder.drop(checkpoint.family, checkpoint.unit)",
        "pass",
        "a release skips its unpublished checkpoints",
    ),
    _cache(
        "holding",
        "self.drop(self._layout.host[family].index, unit)",
        "pass",
        "a release skips what it claimed on the host",
    ),
    _cache(
        "publishing",
        "self._index.pools[plane.index].hold(duplicates)\n                lease.duplicates +=",
        "_ =",
        "another's copy on the own path is not held",
    ),
    # Publishing and failing
    _cache(
        "publishing",
        "self._index.cut(top, top.first)",
        "pass",
        "a failed step's pages stay findable",
    ),
    _cache(
        "publishing",
        "self._take_back(owner, plane, depth - owner.first)",
        "pass",
        "what a failed step put into older pages stays findable",
    ),
    _cache(
        "publishing",
        "nodes = self.publish(lease, tokens, num_pages, step_id, False)",
        "nodes = []",
        "nothing is shared within a step",
    ),
    _cache(
        "publishing",
        "num_full = min(num_full, lease.num_allowed_pages)",
        "pass",
        "a barred lease publishes pages",
    ),
    _cache(
        "index",
        "self.pools[plane].unindex(self.tree.clear_units(node, plane, places))",
        "self.tree.clear_units(node, plane, places)",
        "what is removed is not unindexed",
    ),
    _cache(
        "index",
        "self.events.append(self._removed(node, plane, places.tolist()))",
        "pass",
        "no event for what is evicted",
    ),
    _cache(
        "index",
        "self.events.append(self._removed(gone, plane, places))",
        "pass",
        "no event for what goes with a page",
    ),
    _cache(
        "publishing",
        "first = place if below is node else 0",
        "first = place if below is node else 10**6",
        "what follows pages of a failed step stays on the device",
    ),
    _cache(
        "publishing",
        "return node, min(lease.num_published_pages, node.end)",
        "return node, lease.num_published_pages",
        "a page is published after tokens of others",
    ),
    # Drafts
    _cache(
        "publishing",
        "num_tokens = min(num_tokens, lease.num_sure_tokens)",
        "pass",
        "a guess can be found",
    ),
    _cache(
        "growth",
        "return max(0, self._pages_for(num_sure) * self._page_size - 1 - num_sure)",
        "return MOST_DRAFTS",
        "a state of guesses is saved",
    ),
    _cache(
        "growth",
        "lease.num_sure_tokens = None",
        "pass",
        "a lease never grows past its drafts",
    ),
    Mutation(
        "cache/growth.py",
        "units = lease.shrink(plane.index, num_pages)",
        "units = NO_UNITS",
        "pages of wrong guesses stay held",
        (f"{SPECULATION}test_v03_pages_of_wrong_guesses_are_free_before_the_next_plan",),
    ),
    Mutation(
        "scheduler/results.py",
        "len(tokens) > len(step.drafts[row]) or not self._cache.has_states",
        "True",
        "a state is not rolled back",
        (f"{SPECULATION}test_v01_tokens_are_the_same_with_drafts",),
    ),
    Mutation(
        "scheduler/suffixes.py",
        "        if group not in self._texts:\n            return NO_TOKENS",
        "        group = next(iter(self._texts), group)\n"
        "        if group not in self._texts:\n            return NO_TOKENS",
        "a namespace gets another's output",
        (f"{SPECULATION}test_v02_guesses_come_from_the_namespace_alone",),
    ),
    Mutation(
        "runner/drafts.py",
        "if self._states and count < len(draft.tokens):",
        "if False:",
        "a runner keeps the state of wrong guesses",
        (f"{DRAFTS}[convolutions]",),
    ),
    Mutation(
        "runner/repeated.py",
        "if plan.arrivals:\n            self._layouts.clear()",
        "pass",
        "a row's new owner is sampled as the last one was",
        (
            "unit/runner/test_runner.py::"
            "test_a_step_that_repeats_an_earlier_ones_layout_has_the_same_arrays[8-0-1]",
        ),
    ),
    Mutation(
        "runner/sampling_state.py",
        'self._count_once(sent["said"])',
        "pass",
        "guesses before a position are not counted",
        (f"{RUNNER}test_steps_that_check_drafts_are_graphs_and_give_the_same_tokens",),
    ),
    Mutation(
        "grammar/rows.py",
        "fill_next_token_bitmask(matcher, behind, place)",
        "behind[place] = masks[place]",
        "a mask comes one position late",
        (f"{DRAFTS}[full]",),
    ),
    # Tiers
    _cache(
        "transfers",
        "if plane.is_ordered and not self._index.has_unit_above(",
        "if False and not self._index.has_unit_above(",
        "a page arrives after one that has gone",
    ),
    _cache(
        "prefetch",
        "if count and not ticket.is_barred:",
        "if count:",
        "storage brings an evicted namespace back",
    ),
    _cache(
        "writeback",
        " and not self._publisher.is_promised(node, index, unit)",
        "",
        "a page is written back before it is filled",
    ),
    _cache(
        "transfers",
        "if handover is None:",
        "if handover is not None:\n            return [self._settle(done)]\n        if True:",
        "each copy of a hand-over is acknowledged alone",
    ),
    _cache(
        "writeback",
        "self._open.setdefault(serial, Handover())",
        "self._open.setdefault(0, Handover())",
        "one request's copies wait for another's",
    ),
    _cache(
        "eviction",
        "self._counts_arrivals = plane.tier is Tier.HOST",
        "self._counts_arrivals = False",
        "what has just come to the host goes first",
    ),
    _cache(
        "onboarding",
        "for run in _runs(found) if is_ordered else (found,):",
        "for run in (found,):",
        "pages below and above those of another's copy arrive in one, which is never in its order",
    ),
    _cache("writeback", "(index, unit) not in moving and", "", "a page under way is copied again"),
    _cache(
        "writeback",
        "self._policies.write_back is WriteBack.REUSED",
        "False",
        "the selective policy never copies",
    ),
    _cache(
        "writeback",
        "self._policies.write_back is WriteBack.THROUGH",
        "True",
        "every policy writes through",
    ),
    _cache(
        "transfers",
        "pools[move.source.index].drop(move.source_units)",
        "pass",
        "an acknowledgement does not let go of the source",
    ),
    _cache("transfers", "pool.hold(source_units)", "pass", "the source of a copy is not pinned"),
    _cache(
        "transfers",
        "node = spot.find() if arrived[at] else None",
        "node = spot.find()",
        "a copy that failed is published",
    ),
    _cache("transfers", "lease.num_loads -= 1", "pass", "a lease never hears of its arrival"),
    _cache(
        "transfers",
        "lease.has_failed |= num_failed > 0",
        "pass",
        "a lease does not hear that its load failed",
    ),
    _cache(
        "transfers",
        "self._distrust(move, done)",
        "pass",
        "what can't be read from the host is found again",
    ),
    _cache(
        "onboarding",
        "lease.tables[family][pages] = units",
        "lease.tables[family][[page - 1 for page in pages]] = units",
        "a loaded page lands in another place",
    ),
    _cache(
        "holding",
        "lease.num_host_tokens = max(0, num_pages - match.num_device_pages)",
        "lease.num_host_tokens = max(0, num_pages)",
        "every hit counts as the host's",
    ),
    _cache(
        "costs",
        "return self.load_s(num_pages) <",
        "return self.load_s(num_pages) >",
        "a slow tier is preferred",
    ),
    _cache(
        "costs",
        "num_pages * self._page_s(Tier.STORAGE) + self.load_s(num_pages)",
        "self.load_s(num_pages)",
        "storage counts as quick as the host",
    ),
    _cache(
        "cache",
        "self._measure(Tier.HOST, move.source.family_index, answer)",
        "pass",
        "a slow host is never noticed",
    ),
    _cache(
        "onboarding",
        "if (self._layout.host[family].index, unit) in self._transfers.loading:",
        "if False:",
        "a page on the host is loaded once for each request that wants it",
    ),
    _cache(
        "onboarding",
        "self._transfers.join(copy_id, lease)",
        "pass",
        "a request that shares a load does not wait for it",
    ),
    _cache(
        "onboarding",
        "self._pools[family].hold(np.array([target], np.intp))",
        "pass",
        "a request that shares a load does not hold what it fills",
    ),
    _cache(
        "prefetch",
        "leader = self._asked.get(hashes[0])",
        "leader = None",
        "storage is asked for a page once for each request that wants it",
    ),
    _scheduler(
        "if not (t.is_worth_going_on and self._ask_or_stand(r))",
        "if not self._ask_or_stand(r)",
        "storage is asked again for what it does not have",
        "fetches",
    ),
    _scheduler(
        "over = [r for r, t in done if not (t.is_worth_going_on and self._ask_or_stand(r))]",
        "over = [r for r, t in done]",
        "a request that shares an answer of storage does not go on to the rest",
        "fetches",
    ),
    _scheduler(
        "            self._keep(request)\n            if ticket.kept is not None:",
        "            if ticket.kept is not None:",
        "what came from storage for one that waits is not kept for it",
        "fetches",
    ),
    _scheduler(
        "        self.fetches.end(request)\n        request.state = State.FINISHED",
        "        request.state = State.FINISHED",
        "what was kept for one that is over is never let go of",
        "admission",
    ),
    _scheduler(
        "if self.in_line and self._num_stalled_steps > MOST_STALLED_STEPS:",
        "if False:",
        "a request waits in line after those that do not begin, for as long as they do not",
        "fetches",
    ),
    _scheduler(
        "elif self._is_busy or not self._take_back(request, step_id):",
        "else:",
        "an important request waits for the room of those that are not",
        "fetches",
    ),
    _cache(
        "keeping",
        "if not keep.cursor.is_attached:",
        "if False:",
        "what was evicted by name is kept for those that will never find it",
    ),
    _cache(
        "prefetch",
        "has_room &= is_alone or num_taken + num_pages <= MOST_KEPT * plane.num_units",
        "pass",
        "all of the host is kept for those that wait, and nothing new reaches storage",
    ),
    _cache(
        "transfers",
        "if not self.waits_for(copy_id)",
        "",
        "a page that came before the one above it is never published, and leaves a hole",
    ),
    _cache(
        "prefetch",
        "if arrived[at] and node.units",
        "if node.units",
        "what storage did not have is published",
    ),
    _cache(
        "cache",
        "self.left_storage_alone = not self.storage.may_read",
        "self.left_storage_alone = False",
        "storage that is dead is asked for ever",
    ),
    _cache(
        "writeback",
        " or not self._storage.may_write:",
        ":",
        "storage that is full is written to for ever",
    ),
    _cache(
        "storage_health",
        "self._failures = self._rest_steps = 0",
        "pass",
        "failures far apart count as an outage",
    ),
    # Scheduler
    _scheduler(
        "return self._cache.clip(lease, computed, num_tokens)",
        "return num_tokens",
        "chunks are not clipped",
        "plan_builder",
    ),
    _scheduler(
        "self._cache.commit_step(step.step_id)", "pass", "a step is never committed", "results"
    ),
    _scheduler(
        "self._cache.fail_step(step.step_id)", "pass", "a failed step is not told of", "results"
    ),
    _scheduler("self.free.append(row)", "pass", "a row is never given back", "rows"),
    _scheduler(
        "if lease.has_failed:",
        "if False:",
        "a request begins with what did not arrive",
        "admission",
    ),
    _scheduler(
        "if not lease.onboarding:",
        "if True:",
        "a request begins before its pages are loaded",
        "admission",
    ),
    _scheduler(
        "self._admission.lose_patience(builder.step_id)",
        "pass",
        "a request waits for storage beyond its time",
    ),
    _scheduler(
        "if step_id - r.since >= patience",
        "if step_id - r.since > patience",
        "best effort waits for a step",
        "fetches",
    ),
    _scheduler(
        "if not self._line or place > self._line[-1]:",
        "if True:",
        "a request that comes back is queued after all others",
        "lanes",
    ),
    _scheduler(
        "running = [r for r in self._rows.running if r.row not in placed]",
        "running = list(self._rows.running)",
        "a request of this very step is retracted",
        "victims",
    ),
    _scheduler("self._cache.acknowledge(done)", "pass", "acknowledgements are lost", "results"),
    _scheduler(
        "return self.is_serving or self._cache.has_transfers",
        "return self.is_serving",
        "an idle engine leaves copies unfinished",
    ),
    _scheduler(
        "self._cache.release(lease, Ending.DROPPED)\n        request.lease = None",
        "request.lease = None",
        "claims of those that do not fit are not given back",
        "admission",
    ),
    _scheduler(
        "return self.computed.item(row) != self.committed.item(row)",
        "return False",
        "a row is given back while a launched step writes to its pages",
        "rows",
    ),
    _scheduler(
        "if head.num_in_flight_tokens > 0 or is_kept:",
        "if is_kept:",
        "a retracted request begins again before its token has come",
        "admission",
    ),
    _scheduler(
        "if request.num_in_flight_tokens:\n            self.leaving[request.tenancy] = request",
        "request.num_in_flight_tokens = 0",
        "the token under way of a retracted request is lost",
        "departures",
    ),
    _scheduler(
        "self.due[row] = covered if covered < last else last",
        "self.due[row] = last",
        "a sequence that decodes gets no more pages",
        "rows",
    ),
    _scheduler(
        "np.minimum(computed + self._one_page, self.last[rows])",
        "self.last[rows]",
        "a sequence that has turned a page gets no more",
        "rows",
    ),
    _scheduler(
        "self.tenancy[row] = self.due[row] = self.last[row] = self.notice_at[row] = 0",
        "self.due[row] = self.last[row] = self.notice_at[row] = 0",
        "a step's token goes to a sequence that has ended",
        "rows",
    ),
    _scheduler(
        "request.is_broken = True",
        "pass",
        "a page that a row could not compute is published",
        "results",
    ),
    _scheduler(
        "publish_at = (num_pages + 1) * self._page_size",
        "publish_at = 2**40",
        "what is sampled is not published",
        "rows",
    ),
    _scheduler(
        "return num_computed - num_found, -request.serial",
        "return num_found - num_computed, -request.serial",
        "the request that is dearest to resume is retracted",
        "victims",
    ),
    _cache(
        "eviction",
        "if count > pool.num_free:\n            self._evictors[plane].evict(count - pool.num_free)",
        "if count > pool.num_free or pool.num_cached:\n"
        "            self._evictors[plane].evict(max(1, count - pool.num_free))",
        "a page is evicted with room to spare",
    ),
    _cache(
        "writeback",
        "if count > pool.num_free:\n            self._evictors[host.index].evict",
        "if count and pool.num_cached:\n            self._evictors[host.index].evict(1)\n"
        "        if count > pool.num_free:\n            self._evictors[host.index].evict",
        "the host loses pages with room to spare",
    ),
    # Promises whose tests once missed the fault, each with the test that notices it
    Mutation(
        "cache/holding.py",
        "tree, max_pages = self._tree, (len(tokens) - 1) // self._page_size",
        "tree, max_pages = self._tree, (len(tokens) - 1) // self._page_size\n"
        "        max_pages -= int(max_pages > 0 and key.at(0).namespace.adapter is not None)",
        "an adapter's hit is a page short",
        (
            "unit/cache/test_namespaces.py::test_n03_an_adapter_finds_and_takes_what_base_does",
            "unit/scheduler/test_adapters.py::test_n03_an_adapters_request_finds_as_much_as_bases",
        ),
    ),
    Mutation(
        "messages.py",
        '    adapter: AdapterName | None\n    """Never left out',
        '    adapter: AdapterName | None = None\n    """Never left out',
        "a submission that names no adapter is base's",
        ("unit/cache/test_namespaces.py::test_n10_no_namespace_key_or_field_of_it_has_a_default",),
    ),
    Mutation(
        "cache/growth.py",
        "if len(set(units.tolist())) == len(units):",
        "if True:",
        "of a page that several leave in one step, only one gives up its hold",
        (
            "unit/scheduler/test_windows.py::"
            "test_f04_requests_that_share_a_windows_pages_leave_them_together",
        ),
    ),
    Mutation(
        "cache/eviction.py",
        "if self._reach is not None:\n            self._spare_some(target)",
        "if False:\n            self._spare_some(target)",
        "pages that no request will go on from stay while ends of talks go",
        (
            WINDOWS + "test_p07_the_end_of_a_talk_outlives_the_middle_of_a_newer_one",
            WINDOWS + "test_p07_a_talk_whose_window_moved_on_goes_on_from_its_newest_end",
        ),
    ),
    Mutation(
        "cache/eviction.py",
        "node.last_used if self._reach is None else node.last_resumed",
        "node.last_used",
        "going on at the end of a talk counts as use of every place that it has passed",
        (WINDOWS + "test_p07_going_on_at_the_end_is_no_use_of_what_was_passed",),
    ),
    Mutation(
        "cache/next_turns.py",
        "NEAR = 1",
        "NEAR = 0",
        "a prompt that parts a little before the end of a talk finds nothing of a window",
        (
            WINDOWS
            + "test_p07_a_prompt_that_parts_a_little_before_the_end_finds_the_boundary_before",
        ),
    ),
    Mutation(
        "cache/split.py",
        "ends = {longest, min(SHORT, longest)}",
        "return [Fraction(1, len(families))] * len(families)\n    ends = {longest}",
        "families get equal shares, whatever requests take of each",
        (
            "unit/cache/test_split.py::"
            "test_f09_requests_of_any_length_fit_at_least_half_as_often_as_if_split_for_them",
        ),
    ),
    Mutation(
        "cache/transfers.py",
        "path = self._index.units_above(node, deepest.depth + 1, plane.index)",
        "path = node.units[plane.index][deepest.depth - node.first :][:1]",
        "what lies above a page that has been loaded is not held",
        (
            "unit/cache/test_tiers.py::"
            "test_t09_parts_of_what_a_request_loads_may_arrive_in_any_order[above]",
            "unit/cache/test_tiers.py::"
            "test_t09_parts_of_what_a_request_loads_may_arrive_in_any_order[both]",
        ),
    ),
    Mutation(
        "scheduler/departures.py",
        "self._cache.evict_adapter(digest)",
        "pass",
        "pages of an unloaded adapter outlive its last request",
        (
            "unit/scheduler/test_adapters.py::"
            "test_n13_the_last_request_of_an_unloaded_adapter_takes_its_pages_along",
        ),
    ),
    Mutation(
        "scheduler/queue.py",
        "first = order.first()",
        "first = max((n for n in order if n.rank), key=lambda n: n.rank[1], default=None)",
        "first come, last served between adapters",
        ("unit/scheduler/test_adapters.py::" + ORDER + "[fcfs-order0]",),
    ),
    Mutation(
        "scheduler/queue.py",
        "first = order.first()",
        "first = min((n for n in order if n.rank), key=lambda n: n.rank[1], default=None)",
        "priority counts for nothing between adapters",
        ("unit/scheduler/test_adapters.py::" + ORDER + "[priority-order1]",),
    ),
    Mutation(
        "cache/eviction.py",
        "(last_used, node.serial, node, num_units)",
        "(last_used, hash(str(node.serial)), node, num_units)",
        "which page goes first depends on the process",
        ("unit/scheduler/test_hash_seeds.py::" + HASHES,),
    ),
    Mutation(
        "scheduler/victims.py",
        "- num_found, -request.serial",
        "- num_found, hash(str(request.serial))",
        "the retracted request depends on the process",
        ("unit/scheduler/test_hash_seeds.py::" + HASHES,),
    ),
    Mutation(
        "runner/batch.py",
        "        if not len(slots) or slots.max() == NO_ADAPTER:\n            return None\n",
        "        if not len(slots):\n            return None\n",
        "every step of base rows is given adapter slots",
        (PROMISES + "test_w18_a_step_of_base_rows_is_given_no_adapters",),
    ),
    Mutation(
        "runner/batch.py",
        "place[order] = firsts",
        "place[:] = firsts",
        "tokens come back in the order of the layout",
        (
            "unit/runner/test_step_arrays.py::"
            "test_tokens_come_back_in_the_order_of_the_plan_whatever_the_layout",
        ),
    ),
    Mutation(
        "lora/registry.py",
        "        self._unpin(version)\n        return Unloaded",
        "        return Unloaded",
        "an adapter that was unloaded stays pinned",
        (
            "unit/lora/test_adapter_limits.py::"
            "test_a_slot_is_up_for_others_again_when_no_name_pins_its_adapter_any_more",
        ),
    ),
    Mutation(
        "scheduler/ranking.py",
        "            self._num_few = 0\n",
        "",
        "a line that is first now is not seen among the first few",
        (
            "unit/scheduler/test_ranking.py::"
            "test_the_first_few_are_those_with_the_lowest_ranks_now[0]",
        ),
    ),
    Mutation(
        "runner/runner.py",
        "self._mover.start(plan.adapters, plan.copies)",
        "self._mover.start(plan.adapters, plan.copies)\n        self._mover.wait(60.0)",
        "a step waits for the loads that begin with it",
        (PROMISES + "test_w20_a_load_holds_up_nobody_else",),
    ),
    # Adapter time slices
    Mutation(
        "scheduler/slices.py",
        "        return num_rows and max(num_rows - sum(map(self._num_rows, new)), 0)\n",
        "        return 0\n",
        "a short request of a rare adapter costs others their rows",
        (
            "unit/bench/test_adapter_slices.py::"
            "test_l07_no_request_pauses_for_long_for_a_short_request_of_a_rare_adapter",
        ),
    ),
    Mutation(
        "scheduler/slices.py",
        "return order[:count] if may_displace else None",
        "return None",
        "no entry is paused for another",
        (SLICES + "test_l06_a_newcomer_waits_for_one_quantum_at_most[1]",),
    ),
    Mutation(
        "scheduler/slices.py",
        "            is_young = self._age(victim) < quantum_steps\n",
        "            is_young = False\n",
        "an entry is displaced before its quantum is over",
        (SLICES + "test_l06_a_newcomer_waits_for_one_quantum_at_most[1]",),
    ),
    Mutation(
        "scheduler/slices.py",
        "order = sorted(self.active.values(), key=lambda e: (self._num_rows(e), e.since))",
        "order = sorted(self.active.values(), key=lambda e: (-self._num_rows(e), e.since))",
        "the entry with the most rows is paused",
        (SLICES + "test_l07_the_fewest_rows_are_paused_and_only_while_the_other_runs",),
    ),
    Mutation(
        "scheduler/departures.py",
        "        request.state = State.PAUSED\n",
        "        request.state = State.PAUSED\n"
        "        self._cache.release(request.lease, Ending.DROPPED)\n",
        "the pages of paused requests are given back",
        (SLICES + "test_l07_the_fewest_rows_are_paused_and_only_while_the_other_runs",),
    ),
    Mutation(
        "scheduler/slices.py",
        "d for d in few if d in lanes and self.is_open(d)",
        "d for d in few if d in lanes and self.is_open(d) and not self.paused",
        "adapters that run are held back while others are paused",
        (SLICES + "test_l07_new_requests_of_the_others_begin_while_some_are_paused",),
    ),
    Mutation(
        "scheduler/scheduler.py",
        "for request in self.slices.returning():",
        "for request in ():",
        "paused requests never resume",
        (SLICES + "test_l07_the_fewest_rows_are_paused_and_only_while_the_other_runs",),
    ),
    Mutation(
        "scheduler/slices.py",
        "        return adapter in self.active or self._fits_too(adapter)\n",
        "        return adapter in self.active\n",
        "an adapter that fits beside those that run does not begin",
        ("unit/scheduler/test_adapters.py::test_l02_zero_is_no_cap",),
    ),
    Mutation(
        "scheduler/slices.py",
        "        return self.step_id - since >= OVERDUE_STEPS\n",
        "        return False\n",
        "an entry with few rows stays paused until others end",
        (SLICES + "test_l07_a_pause_ends_after_128_steps_and_a_quantum",),
    ),
    Mutation(
        "scheduler/slices.py",
        "if entry.state is EntryState.WAITING or request.since > entry.started:",
        "if entry.state is EntryState.WAITING:",
        "new requests of a paused adapter wait until it is overdue",
        (SLICES + "test_l06_new_requests_of_a_paused_adapter_bring_it_back",),
    ),
    Mutation(
        "scheduler/slices.py",
        "may_displace = self._is_urgent(entry, head) or len(entry.paused) >= num_rows",
        "may_displace = True",
        "a paused entry displaces one with more rows before it is overdue",
        (SLICES + "test_l07_a_pause_ends_after_128_steps_and_a_quantum",),
    ),
    Mutation(
        "scheduler/slices.py",
        "loads = QUANTUM_LOADS if self.adapters.loads_ahead else QUANTUM_LOADS_ALONE",
        "loads = QUANTUM_LOADS",
        "rows are idle for a load every few steps where none can be loaded ahead",
        (SLICES + "test_l06_a_newcomer_waits_for_one_quantum_at_most[0]",),
    ),
    Mutation(
        "scheduler/slices.py",
        "        claims, self._claims = self._claims, []\n",
        "        claims = self._claims\n",
        "weights are wanted for a request that is over",
        (
            "property/test_simulation.py::"
            "test_r01_requests_do_not_take_each_others_place_for_ever[30000766]",
        ),
    ),
    Mutation(
        "scheduler/slices.py",
        "if r.since <= latest]",
        "]",
        "a request loses its row before its quantum is over",
        (FAIR + "test_l08_tenants_that_both_wait_are_served_alike[2]",),
    ),
    Mutation(
        "scheduler/slices.py",
        "                lender = self._lender(request, num_rows)\n",
        "                lender = None\n",
        "one adapter that holds every row starves the others",
        (SLICES + "test_l06_an_entry_without_a_row_takes_one_of_the_entry_with_the_most[1]",),
    ),
    Mutation(
        "scheduler/slices.py",
        "            order = [e for e in order if self._importance(e, None) >= own]\n",
        "",
        "an important stream is paused for an unimportant newcomer",
        (SLICES + "test_l08_a_less_important_entry_displaces_no_more_important_one[2]",),
    ),
    Mutation(
        "engine/adapter_runtime.py",
        "        max_loras=num_at_once,\n",
        "        max_loras=0,\n",
        "the server's cap on adapters has no effect",
        (PROMISES + "test_l05_the_servers_setting_limits_the_adapters_of_a_step[1]",),
    ),
    Mutation(
        "scheduler/scheduler.py",
        "            or self.adapters.has_intents\n",
        "",
        "an idle engine keeps what was unloaded",
        (PROMISES + "test_w08_an_idle_engine_gives_an_unloaded_adapters_memory_back[True]",),
    ),
    Mutation(
        "scheduler/plan_builder.py",
        "return self._cache.clip(lease, computed, num_tokens)",
        "if not any(p.family.is_state for p in self._cache.layout.device):\n"
        "            return num_tokens\n"
        "        return self._cache.clip(lease, computed, num_tokens)",
        "the scheduler asks what families the cache has",
        (
            "architecture/test_boundary.py::test_h01_the_scheduler_uses_the_boundary_alone[plan_builder]",
        ),
    ),
    # Policies
    Mutation(
        "scheduler/policies/fair.py",
        "self._highest if first is None else first[0]",
        "0",
        "a tenant that ran alone is in debt for it",
        (FAIR + "test_l08_who_ran_alone_for_long_takes_turns_with_200_newcomers[3]",),
    ),
    Mutation(
        "scheduler/policies/fair.py",
        "self.accounts[request.group] = Account(self.virtual_time)",
        "self.accounts[request.group] = Account(0)",
        "a tenant that was away has credit for it",
        (FAIR + "test_l08_tenants_that_both_wait_are_served_alike[0]",),
    ),
    Mutation(
        "scheduler/policies/fair.py",
        "del self.accounts[request.group]",
        "pass",
        "accounts outlive their tenants",
        (FAIR + "test_l08_no_account_outlives_its_tenant",),
    ),
    Mutation(
        "scheduler/policies/priority.py",
        "least = max(map(_priority, candidates), default=0)",
        "least = min(map(_priority, candidates), default=0)",
        "the most important gives way",
        (IMPORTANCE + "test_l08_an_important_arrival_takes_the_least_important_row",),
    ),
    Mutation(
        "scheduler/victims.py",
        "return [r for r in decoding if importance(r) > importance(request)]",
        "return [r for r in decoding if importance(r) >= importance(request)]",
        "equals take each other's place",
        (IMPORTANCE + "test_l08_equals_never_take_each_others_place[priority]",),
    ),
    # A request's parameters, tokens and text
    Mutation(
        "api/middleware.py",
        "hmac.compare_digest(given, key)",
        "given == key",
        "a wrong key is told the sooner the less of it is right",
        (
            "unit/api/test_keys.py::test_r05_keys_are_compared_in_constant_time[/v1/models-ascii]",
            "unit/api/test_keys.py::"
            "test_r05_keys_are_compared_in_constant_time[/v1/load_lora_adapter-other]",
        ),
    ),
    Mutation(
        "kernels/blocks.py",
        "offsets = low + MIDDLE * scales",
        "offsets = low + MIDDLE * span",
        "what a 4-bit block's codes are counted from is wrong",
        ("unit/kernels/test_blocks.py::test_q03_codes_are_found_in_the_numbers_of_a_file",),
    ),
    Mutation(
        "kernels/attention/groups.py",
        "ends[rows] - shared.shape[1] * page_size,",
        "ends[rows],",
        "a row sees keys past its end where it shares a prefix",
        (
            "unit/kernels/test_attention_kernel.py::"
            "test_a_common_prefix_is_attended_to_once_and_exactly",
        ),
    ),
    Mutation(
        "kernels/attention/torch_ops.py",
        "common = common.index_select(0, group.places)",
        "common = common[: len(group.places)]",
        "rows of a prefix take another row's part where prefixes have unequal numbers of rows",
        (
            "unit/kernels/test_attention_kernel.py::"
            "test_rows_of_two_prefixes_attend_to_each_of_them_once_and_exactly",
        ),
    ),
    Mutation(
        "kernels/sampling/cuts.py",
        "ids = likeliest(order_keys(logits), width)",
        "ids = logits.topk(width, dim=-1).indices",
        "which of equal logits are among the top depends on the width",
        (
            "property/test_sampling_neighbours.py::"
            "test_s01_a_row_gets_the_token_that_the_plain_rules_give[300-0-fast]",
        ),
    ),
    Mutation(
        "runner/sampling_state.py",
        'tables.counts.index_fill_(0, sent["counted"], 0)',
        "pass",
        "penalties are of the tokens of a row's last owner, too",
        ("unit/kernels/test_sampling.py::test_a_row_that_leaves_takes_what_it_asked_for_with_it",),
    ),
    Mutation(
        "kernels/lora_ops/batch.py",
        "if group is None or first > 0 or int(group.rows.max()) >= last:",
        "if group is None or int(group.rows.max()) >= last:",
        "a later piece of a step adds the decoding rows' adapters to its own rows",
        (
            "unit/kernels/test_lora_kernel.py::"
            "test_a_step_cut_into_pieces_adds_the_same_as_the_whole[a long run among short "
            "ones-True]",
        ),
    ),
    Mutation(
        "kernels/lora_ops/stacks.py",
        "a[index, :, first : first + rank] = member.a[own.ranks].t()",
        "a[index, :, own.ranks] = member.a[own.ranks].t()",
        "adapters of unequal ranks are stacked in each other's columns",
        (
            "unit/kernels/test_lora_kernel.py::"
            "test_mixed_ranks_and_base_rows_equal_the_naive_sum_w17[even decodes-True-dtype0]",
        ),
    ),
    Mutation(
        "kernels/sampling/torch_ops.py",
        "for index in self._good(penalized).tolist():",
        "for index in []:",
        "penalties are of the tokens that a row arrived with alone",
        (
            "unit/kernels/test_sampling.py::"
            "test_tokens_are_counted_for_rows_with_penalties_alone[torch_ops]",
        ),
    ),
    Mutation(
        "kernels/sampling/torch_ops.py",
        "self._fail(int(at[0]), error)",
        "raise",
        "a row whose draw fails takes the step with it",
        ("unit/runner/test_runner.py::test_a_row_whose_sampling_fails_fails_alone[draw]",),
    ),
    Mutation(
        "sampling.py",
        "isinstance(value, Integral) and not isinstance(value, bool)",
        "isinstance(value, Integral)",
        "True is a token id",
        (
            "property/test_odd_sampling_params.py::"
            "test_what_passed_the_door_once_and_failed_a_step_is_refused[values0-True]",
        ),
    ),
    Mutation(
        "text/detokenizer.py",
        "if token in self._skipped or not self._tokenizer.has_token(token):",
        "if False:",
        "a word goes on after a skipped token as if it began there",
        (
            "unit/text/test_every_tokenizer_kind.py::"
            "test_streamed_pieces_joined_are_the_whole_decode[True-wordpiece]",
        ),
    ),
    Mutation(
        "scheduler/policies/pack.py",
        "return dict.fromkeys([*resident, *longest])",
        "return first(count)",
        "packing is first come, first served",
        (PACK + "test_l08_packing_loads_adapters_less_often",),
    ),
    Mutation(
        "scheduler/policies/pack.py",
        "if lane is not None and lane.head.serial <= self._group_end:",
        "if lane is not None:",
        "an adapter that is asked for without end is packed without end",
        (PACK + "test_l08_who_comes_while_its_adapter_has_its_turn_is_of_its_next_group",),
    ),
    Mutation(
        "scheduler/policies/pack.py",
        "return 0 if request.num_cached_tokens is None else -1",
        "return 0",
        "a retracted request waits for a group of others",
        (PACK + "test_l08_who_was_retracted_goes_on_before_the_group",),
    ),
    Mutation(
        "scheduler/policies/pack.py",
        "    row_patience_steps = ROW_PATIENCE_STEPS\n",
        "",
        "a request that waits for its group to begin takes a row at once",
        (PACK + "test_l08_fewer_adapters_run_at_once_where_all_are_on_the_device",),
    ),
    Mutation(
        "process/progress.py",
        "if not self._is_on:",
        "if True:",
        "loads are silent",
        ("unit/test_progress.py::test_s05_loads_show_their_progress[True-False-llm]",),
    ),
    Mutation(
        "bench/drive.py",
        "return end.at_s - begin.at_s, end.num_tokens - begin.num_tokens",
        "return end.at_s - begin.at_s / 2, end.num_tokens - begin.num_tokens",
        "a slow prompt changes what decoding is said to take",
        (
            "unit/bench/test_traffic_bench.py::"
            "test_b04_a_slow_prompt_does_not_make_decoding_look_faster",
        ),
    ),
    Mutation(
        "bench/serve.py",
        "and mean <= promise.between_tokens_s",
        "",
        "slow streams count as served well",
        ("unit/bench/test_serve_bench.py::test_b01_a_promise_that_is_not_kept_is_not_goodput",),
    ),
    Mutation(
        "api/connections.py",
        'and scope["http_version"] == "1.1"',
        "",
        "clients that know no chunks are sent some",
        ("unit/api/test_short_way.py::test_a_stream_is_whole_chunks_and_older_clients_get_none",),
    ),
    Mutation(
        "text/assembler.py",
        "self._is_plain = not sampling.stop and sampling.logprobs is None",
        "self._is_plain = True",
        "stop strings are not looked for",
        (
            "unit/text/test_assembler.py::test_a_stop_string_ends_the_sequence_and_asks_for_its_abort",
        ),
    ),
    Mutation(
        "bench/serve_workload.py",
        'f"bench-{self.seed}"',
        '"bench"',
        "the second run finds the first one's prompts in the cache",
        (
            "unit/bench/test_serve_bench.py::"
            "test_b01_a_case_of_bench_traffic_is_sent_token_by_token_and_then_at_shares_of_its_rate",
        ),
    ),
    Mutation(
        "layers/weights/fp8.py",
        "return scales.repeat_interleave(self.block[0], 0)[:num_rows]",
        "return scales.repeat(self.block[0], 1)[:num_rows]",
        "rows take the scale of another block",
        (
            "unit/models/test_fp8_loading.py::"
            "test_q01_a_checkpoint_gives_the_logits_of_its_numbers[llama-fp8-block]",
        ),
    ),
    Mutation(
        "layers/weights/formats.py",
        "is_left = any(name in self.unquantized_names",
        "is_left = all(name in self.unquantized_names",
        "an unquantized projection is put into a matrix of FP8",
        (
            "unit/models/test_fp8_loading.py::"
            "test_q01_projections_that_a_checkpoint_leaves_unquantized_stay_exact[fbgemm-left0]",
        ),
    ),
    Mutation(
        "layers/weights/fp8.py",
        "if cut == 1 and self.block is None:",
        "if cut == 1 and matrix.has_row_scales:",
        "ranks whose columns share one scale take the scales of all",
        (
            "unit/models/test_deepseek_fp4_loading.py::"
            "test_q02_experts_of_deepseek_v4_stay_in_4_bits",
        ),
    ),
    Mutation(
        "layers/context.py",
        "return self if kept is self.format else replace(self, format=kept)",
        "return self",
        "heads and routers are quantized, too",
        (
            "unit/models/test_fp8_loading.py::"
            "test_q01_weights_are_rounded_as_they_are_loaded_and_nothing_else_is[qwen3-moe]",
        ),
    ),
    Mutation(
        "kernels/triton_fp8_rows.py",
        "(scaled - large).to(tl.float8e4nv)",
        "(large - scaled).to(tl.float8e4nv)",
        "what the first number of FP8 leaves is taken off twice",
        (
            "unit/kernels/test_scaled_gemm_triton.py::"
            "test_q01_rows_are_rounded_to_the_references_bits[144-2-None-dtype0]",
        ),
    ),
    Mutation(
        "kernels/gemm/triton_early.py",
        "while num_blocks % tiling.num_splits or num_blocks < 2 * tiling.num_splits:",
        "while num_blocks < 2 * tiling.num_splits:",
        "the last columns of a product whose splits are not alike are left out",
        (
            "unit/kernels/test_early_triton.py::"
            "test_q01_which_products_have_weights_that_come_early",
        ),
    ),
    Mutation(
        "kernels/triton_fp8_rows.py",
        "sums = tl.sum(errors, axis=0) * (factors * factors)",
        "sums = tl.sum(errors, axis=0)",
        "errors of rows with a larger scale count as those of the smallest",
        (
            "unit/kernels/test_scaled_gemm_triton.py::"
            "test_q01_rows_are_rounded_to_the_references_bits[384-1-None-dtype0]",
        ),
    ),
    Mutation(
        "kernels/norm/triton.py",
        "tl.store(scales + piece * num_rows + rows, of_groups, mask=r < count)",
        "tl.store(scales + rows * tl.num_programs(0) + piece, of_groups, mask=r < count)",
        "rows in FP8 have another piece's scale",
        (
            "unit/kernels/test_fp8_rows_triton.py::"
            "test_q01_rows_with_adapters_are_divided_by_the_product_that_reads_them[None-dtype0]",
        ),
    ),
    Mutation(
        "kernels/qk_rope_kv_write/triton.py",
        "place = layer_kv + base[:, None]  #",
        "to = place = layer_kv + base[:, None]  #",
        "keys and values in FP8 do not compile for a GPU",
        (f"{COMPILES}[fp8]",),
    ),
    Mutation(
        "models/load.py",
        "if name.endswith(_OF_PAGES)",
        "if False and name.endswith(_OF_PAGES)",
        "scales of keys and values are left out without a word",
        (
            "unit/models/test_fp8_loading.py::"
            "test_q04_scales_of_keys_and_values_are_refused_by_name_where_they_would_count",
        ),
    ),
    Mutation(
        "layers/weights/mxfp4.py",
        "torch.stack((blocks & 0x0F, blocks >> 4), dim=-1)",
        "torch.stack((blocks >> 4, blocks & 0x0F), dim=-1)",
        "the two numbers of a byte change places",
        (
            "unit/models/test_mxfp4_loading.py::"
            "test_q02_numbers_are_those_that_transformers_unpacks",
        ),
    ),
    Mutation(
        "kernels/fused_moe/triton_fp4.py",
        "mul.rn.bf16x2 $2, bits, $12;",
        "mul.rn.bf16x2 $2, bits, $10;",
        "a slice of 4-bit numbers has its neighbours' power of two",
        (
            "unit/kernels/test_fp4_instructions.py::"
            "test_q02_instructions_give_every_number_and_every_power_exactly",
        ),
    ),
    Mutation(
        "kernels/fused_moe/triton_fp4.py",
        "power = ((exponents >> (8 * (which // 2))) & 255) << 23",
        "power = ((exponents >> (8 * (which // 4))) & 255) << 23",
        "two groups of 4-bit numbers share a power of two",
        ("unit/kernels/test_fp4_triton.py::test_q02_experts_equal_the_reference[few-1-dtype0]",),
    ),
    Mutation(
        "layers/weights/fill.py",
        "{Side.OUTPUT: 0, Side.INPUT: 1, None: None}[side]",
        "{Side.OUTPUT: 0, Side.INPUT: 0, None: None}[side]",
        "a rank takes the rows of a 4-bit matrix of which it has columns",
        ("unit/models/test_mxfp4_loading.py::test_q02_two_ranks_give_one_ranks_logits",),
    ),
    Mutation(
        "models/weight_bytes.py",
        "num_weights(spec, num_head_rows) - whole - of_experts",
        "num_weights(spec, num_head_rows) - whole",
        "experts in 4 bits count as unquantized ones, too",
        (
            "unit/models/test_mxfp4_loading.py::"
            "test_q02_what_experts_take_is_counted_before_they_are_loaded",
        ),
    ),
    Mutation(
        "kernels/mxfp4.py",
        "codes = torch.where(codes % 2 == 1, above, codes)",
        "codes = torch.where(codes % 2 == 0, above, codes)",
        "a number between two of 4 bits goes to the odd one",
        ("unit/kernels/test_fp4_triton.py::test_q02_numbers_that_are_in_mxfp4_stay_as_they_are",),
    ),
    Mutation(
        "kernels/delta_rule/torch_ops.py",
        "both = torch.cat((v, k * since), dim=-1).mul_(beta)",
        "both = torch.cat((v, k), dim=-1).mul_(beta)",
        "a chunk reads the state before it as if nothing decayed since",
        (
            "unit/kernels/test_recurrent_kernels.py::"
            "test_the_delta_rule_equals_the_reference_f06[mixed-dtype0]",
        ),
    ),
    Mutation(
        "kernels/mamba/torch_ops.py",
        "matrix = matrix * through[:, :, chunk] + added[:, :, chunk]",
        "matrix = matrix + added[:, :, chunk]",
        "a state does not decay from chunk to chunk",
        (
            "unit/kernels/test_recurrent_kernels.py::"
            "test_the_scan_of_mamba_equals_the_reference_f06[mixed-dtype0]",
        ),
    ),
    Mutation(
        "layers/delta_net.py",
        "beta, decay = _in(ba, groups, -1).chunk(2, dim=2)",
        "decay, beta = _in(ba, groups, -1).chunk(2, dim=2)",
        "Qwen3-Next's betas and decays change places",
        (
            "unit/models/test_logits_parity.py::"
            "test_prefill_chunks_and_decode_give_transformers_logits[qwen3-next]",
        ),
    ),
    Mutation(
        "layers/weights/fill.py",
        "self.place.copy_(part[list(self.order)] if self.order else part)",
        "self.place.copy_(part)",
        "Qwen3-Next's filters keep the checkpoint's order, and its channels have another",
        (
            "unit/models/test_logits_parity.py::"
            "test_prefill_chunks_and_decode_give_transformers_logits[qwen3-next]",
        ),
    ),
    Mutation(
        "layers/shared_moe.py",
        "return DeferredOutput(norm.add_gated(chosen.sums, shared.sums, x, weight[0]))",
        "return DeferredOutput(norm.add_gated(chosen.sums, shared.sums, x, 0 * weight[0]))",
        "the shared expert's gate is half open for all rows",
        (
            "unit/models/test_logits_parity.py::"
            "test_prefill_chunks_and_decode_give_transformers_logits[qwen3-next]",
        ),
    ),
    Mutation(
        "layers/mamba.py",
        "squares = self._shard.add_up(values.square().sum(1, keepdim=True))",
        "squares = values.square().sum(1, keepdim=True) * self._shard.size",
        "each rank normalises its own channels",
        ("unit/models/test_sharding.py::test_w16_two_ranks_give_one_ranks_logits[granite-h]",),
    ),
    Mutation(
        "layers/linear.py",
        "parts, pieces=pieces, side=side)",
        "parts, pieces=pieces)",
        "every rank has all of an adapter",
        (
            "unit/models/test_adapter_sharding.py::"
            "test_w16_two_ranks_give_one_ranks_logits_with_adapters"
            "[qwen3.5-ExpertFormat.PER_EXPERT]",
        ),
    ),
    Mutation(
        "cache/families/recurrent.py",
        "return 1  # the one state at exactly this boundary",
        "return None",
        "a hit counts as use of every state on its path",
        ("unit/peers/test_prefixes.py::test_resuming_is_no_use_of_the_states_before",),
    ),
    Mutation(
        "runner/step_arrays.py",
        'arrays["units"][:, len(inputs.rows) :] = spare_units[:, None]',
        "pass",
        "padding computes the last sequence's state once more",
        ("unit/runner/test_step_arrays.py::test_f05_padding_has_the_spare_states",),
    ),
    Mutation(
        "runner/mixed.py",
        '"pages": _filled(tokens["pages"], shape.num_tokens, NOWHERE),',
        '"pages": _filled(tokens["pages"], shape.num_tokens, 0),',
        "tokens that pad a mixed step write into the first page",
        (
            "unit/runner/test_mixed.py::"
            "test_a_shape_holds_its_step_and_every_step_of_a_shape_has_the_same_arrays[0]",
        ),
    ),
    Mutation(
        "runner/mixed.py",
        '"starts": _filled(starts, MAX_PROMPTS + 1, starts[-1]),',
        '"starts": _filled(starts - starts[0], MAX_PROMPTS + 1, starts[-1] - starts[0]),',
        "prompts of a mixed step attend for the rows that decode",
        (
            "unit/runner/test_runner.py::"
            "test_prompts_beside_decodes_run_in_a_graphs_shape_and_give_the_same_tokens[llama]",
        ),
    ),
    Mutation(
        "kernels/attention/triton_hopper.py",
        "        and not window\n",
        "",
        "prompts of layers with a window see what lies in front of it, on Hopper",
        ("unit/kernels/test_hopper_triton.py::test_what_is_sent_to_the_kernel_for_hopper",),
    ),
    Mutation(
        "kernels/attention/triton_hopper.py",
        "q.dtype == layer_kv.dtype == torch.bfloat16",
        "q.dtype == torch.bfloat16",
        "FP8 pages are copied as if they were bfloat16, on Hopper",
        ("unit/kernels/test_hopper_triton.py::test_what_is_sent_to_the_kernel_for_hopper",),
    ),
    Mutation(
        "kernels/gemm/triton_hopper.py",
        "        or not x.is_contiguous()\n",
        "",
        "rows with other numbers between them are read as if they had none, on Hopper",
        (
            "unit/kernels/test_hopper_gemm_triton.py::"
            "test_which_products_are_sent_to_the_kernel_for_hopper",
        ),
    ),
    Mutation(
        "kernels/gemm/triton_hopper.py",
        "    if DEPENDENT:\n        gdc_wait()\n    for i in range(early):",
        "    for i in range(early):",
        "rows are read before the kernel in front has written them, on Hopper",
        (f"{COMPILES}[gluon]",),
    ),
    Mutation(
        "kernels/attention/triton.py",
        "most = min(MOST_PARTS, triton.cdiv(window, tokens) or MOST_PARTS)",
        "most = MOST_PARTS",
        "a window is cut into more parts than it has tiles",
        (
            "unit/kernels/test_attention_triton.py::"
            "test_as_many_parts_as_fill_a_chip_and_have_a_tile[1-8-33-2]",
        ),
    ),
    Mutation(
        "kernels/attention/sharing.py",
        "common = limit if same.all() else int(np.argmin(same))",
        "common = limit",
        "rows read each other's pages past what they share",
        ("unit/kernels/test_sharing.py::test_groups_share_what_they_say_and_no_row_is_in_two[1]",),
    ),
    Mutation(
        "runner/sharing.py",
        'if plan.arrivals:\n            self._found_for = b""',
        "pass",
        "a row's new owner reads what the last one shared",
        (
            "unit/runner/test_sharing_rows.py::"
            "test_what_rows_share_is_found_again_when_somebody_arrives",
        ),
    ),
    Mutation(
        "kernels/recurrent/reference.py",
        "is_fresh = context_lens == starts.diff()",
        "is_fresh = context_lens < 0",
        "a sequence begins with the state of the unit's last owner",
        (
            "unit/models/test_logits_parity.py::"
            "test_prefill_chunks_and_decode_give_transformers_logits[lfm2-biased]",
        ),
    ),
    Mutation(
        "layers/weights/fill.py",
        "begin = end if piece.is_whole else end + shard.rank * piece.size",
        "begin = end",
        "every rank has the first part of a product's pieces",
        ("unit/models/test_sharding.py::test_w16_two_ranks_give_one_ranks_logits[lfm2]",),
    ),
    Mutation(
        "store/host_link.py",
        "rows = source[first : first + count, part]",
        "rows = source[place : place + count, part]",
        "units come from the places where they go to",
        (
            "unit/store/test_tier_copies.py::test_t01_t06_device_host_files_and_back_is_bit_identical",
        ),
    ),
    Mutation(
        "store/batched_copies.py",
        "breaks = (np.diff(sources) != 1) | (np.diff(targets) != 1)",
        "breaks = np.diff(targets) != 1",
        "units that lie together on one side are copied as if they did on both",
        ("unit/store/test_batched_copies.py::test_t01_pieces_are_the_units_bytes_and_no_others",),
    ),
    Mutation(
        "store/batched_copies.py",
        "(target.data_ptr() + begin)",
        "target.data_ptr()",
        "a part of a unit is put at the unit's beginning",
        ("unit/store/test_batched_copies.py::test_t01_pieces_are_the_units_bytes_and_no_others",),
    ),
    Mutation(
        "store/layer_arrivals.py",
        "return slice(members[0] * of_layer, (members[-1] + 1) * of_layer)",
        "return slice(members[0] * of_layer, members[-1] * of_layer)",
        "the last layer of a group never comes",
        ("unit/store/test_layer_arrivals.py::test_t10_groups_cover_every_layers_bytes_once",),
    ),
    Mutation(
        "store/layer_arrivals.py",
        "while self._num_there <= group:",
        "while self._num_there < group:",
        "a layer waits for the groups before its own alone",
        (
            "unit/store/test_layer_arrivals.py::test_t10_a_layer_waits_for_its_group_and_those_before",
        ),
    ),
    Mutation(
        "models/decoder.py",
        "step.before_layer(index)",
        "step.before_layer(0)",
        "layers wait for the pages of the first one alone",
        ("unit/test_llm_tiers.py::test_t10_a_load_overlaps_its_own_requests_computation",),
    ),
    Mutation(
        "cache/onboarding.py",
        "return self._pools[family].num_available + self._states.num_passed(family)",
        "return self._pools[family].num_available",
        "a request that is told that it has room is refused it, and waits for ever",
        (f"{ADAPTERS}test_l04_h05_a_request_that_loads_its_state_gets_the_room_it_was_promised",),
    ),
    Mutation(
        "cache/onboarding.py",
        "lease.num_published_pages = min(lease.num_published_pages, first)",
        "pass",
        "what comes while a request computes is not published before what follows it",
        (
            "unit/scheduler/test_overlapped_loads.py::test_t10_whatever_happens_meanwhile_everybody_has_his_own_tokens",
        ),
    ),
    Mutation(
        "scheduler/admission.py",
        "is_alone = builder.is_empty and not self._are_others",
        "is_alone = True",
        "a step of others waits for one request's pages",
        (
            "unit/scheduler/test_overlapped_loads.py::test_t10_others_do_not_wait_for_somebodys_pages",
        ),
    ),
    Mutation(
        "cache/cache.py",
        "return self.costs.load_s(num_pages) <= MOST_OVERLAP_S",
        "return True",
        "a newcomer waits for a load that takes long",
        (
            "unit/scheduler/test_overlapped_loads.py::"
            "test_t10_what_can_not_or_should_not_overlap_waits[it would take long]",
        ),
    ),
    Mutation(
        "store/unit_values.py",
        "return unit if checksum == _checksum(key, unit) else None",
        "return unit",
        "a damaged value is a page",
        ("unit/store/test_unit_values.py::test_t03_every_flipped_bit_is_found",),
    ),
    Mutation(
        "store/unit_values.py",
        'struct.pack("<III", family, rank, num_ranks)',
        'struct.pack("<II", family, num_ranks)',
        "ranks overwrite each other's parts in storage",
        ("unit/store/test_tier_copies.py::test_families_and_ranks_have_keys_of_their_own",),
    ),
    Mutation(
        "store/storage_link.py",
        "late = [errand for errand in self._under_way if errand.deadline < now]",
        "late = []",
        "storage that hangs is waited for without end",
        (
            "unit/store/test_tier_copies.py::test_t03_storage_that_does_not_answer_is_given_up_and_comes_too_late",
        ),
    ),
    Mutation(
        "store/backends/files.py",
        "if not self._make_room(size):",
        "if False:",
        "a folder grows beyond its limit",
        (
            "unit/store/test_backends.py::test_t12_the_folder_stays_within_its_limit_and_loses_what_was_used_longest_ago",
        ),
    ),
    Mutation(
        "store/backends/files.py",
        "if _is_taken(file) and self._is_there(file):",
        "if _is_taken(file):",
        "two servers write at once after a folder was emptied",
        ("unit/store/test_backends.py::test_t12_a_lock_on_a_file_that_is_gone_is_nobodys",),
    ),
    Mutation(
        "engine/build.py",
        "if has_changed:",
        "if False:",
        "pages are kept under the name of weights that did not compute them",
        (
            "unit/test_llm_weights.py::test_g06_files_that_change_while_they_are_read_end_the_engine",
        ),
    ),
    Mutation(
        "cache/cache.py",
        "if not self.costs.is_worth_fetching(num_pages, num_pages * self.page_size):",
        "if False:",
        "slow storage is asked again and again",
        ("unit/cache/test_costs.py::test_t05_slow_storage_is_not_asked",),
    ),
    Mutation(
        "cache/keys.py",
        'fields = framed(_DOMAIN, adapter, salt, struct.pack("<Q", owner.begin))',
        "fields = framed(_DOMAIN, adapter, salt)",
        "where an adapter begins is not part of a page's name in storage",
        (
            "unit/cache/test_owners_apart.py::test_n04_t07_random_pairs_of_owners_stay_apart_on_every_tier",
        ),
    ),
    Mutation(
        "store/adapter_layouts.py",
        "key = (config_file.read(0, config_file.num_bytes), raw, weights_file.num_bytes)",
        'key = (b"", raw, weights_file.num_bytes)',
        "adapters with the same tensors have the scaling of the first of them",
        ("unit/store/test_adapter_layouts.py::test_another_config_is_another_layout",),
    ),
    Mutation(
        "store/adapter_layouts.py",
        "key = (config_file.read(0, config_file.num_bytes), raw, weights_file.num_bytes)",
        "key = (config_file.read(0, config_file.num_bytes), raw, 0)",
        "a file that was cut short is read as if it were whole",
        (
            "unit/store/test_adapter_layouts.py::test_a_file_cut_short_is_refused_though_its_header_is_known",
        ),
    ),
    Mutation(
        "store/host_memory.py",
        "borders = [begin, *range(LOCK_BYTES, end, LOCK_BYTES), end]",
        "borders = [begin, end]",
        "a copy crosses what was locked at once, which the driver refuses",
        ("unit/store/test_host_memory.py::test_nothing_is_copied_across_what_was_locked_at_once",),
    ),
    Mutation(
        "store/adapter_files.py",
        "with contextlib.suppress(ManyrootsError, OSError), _without_collector():",
        "with contextlib.suppress(OSError), _without_collector():",
        "one folder that can't be served keeps those after it from being foreseen",
        (
            "unit/store/test_adapter_layouts.py::test_what_was_foreseen_is_not_described_when_it_is_wanted",
        ),
    ),
    Mutation(
        "store/host_memory.py",
        "            elif len(piece.memory) >= self._size and piece",
        "            elif piece",
        "memory for a small adapter stands for one of the largest",
        (
            "unit/store/test_host_memory.py::test_what_was_not_ready_is_locked_when_it_is_full_and_used_again",
        ),
    ),
    Mutation(
        "store/host_memory.py",
        "            if not piece.is_locked:\n",
        "            if False:\n",
        "pages that were not locked are given away as if they were",
        ("unit/store/test_host_memory.py::test_what_nobody_filled_is_not_given_to_others",),
    ),
    Mutation(
        "store/host_memory.py",
        "            if piece.num_cuts:\n                continue\n",
        "",
        "memory is given away while an adapter is still in it",
        ("unit/store/test_host_memory.py::test_small_adapters_share_a_piece_and_none_overlaps",),
    ),
    Mutation(
        "kernels/lora_ops/triton.py",
        "total = tl.dot(h, tl.trans(weight), total,",
        "total = tl.dot(h, tl.trans(first_ranks), total,",
        "ranks beyond the first 64 are multiplied with the first ones' weights",
        (
            "unit/kernels/test_fused_triton.py::test_add_norm_and_a_product_equal_the_whole_norm_and_the_product",
        ),
    ),
    Mutation(
        "kernels/activation/triton.py",
        "up_ranks, up_b, up_start, up_rank, first, count, row, cols, num_rows, n,",
        "gate_ranks, up_b, up_start, up_rank, first, count, row, cols, num_rows, n,",
        "a row that is its adapter's only one has the gate's weights for its up",
        ("unit/kernels/test_fused_triton.py::test_gated_equals_the_reference",),
    ),
    Mutation(
        "kernels/gemm/triton.py",
        "if tl.max(row_ok.to(tl.int32), axis=0) > 0:",
        "if tl.min(row_ok.to(tl.int32), axis=0) > 0:",
        "a tile in which one adapter leaves a product alone is left out for all",
        (
            "unit/kernels/test_fused_triton.py::test_linear_gives_partial_sums_of_the_product_and_of_the_adapters_shrink",
        ),
    ),
    Mutation(
        "kernels/norm/triton.py",
        "for begin in range(0, count, BLOCK_R):",
        "for begin in range(0, BLOCK_R, BLOCK_R):",
        "of an adapter's rows only the first sixteen are normalised",
        (
            "unit/kernels/test_fused_triton.py::test_add_norm_and_a_product_equal_the_whole_norm_and_the_product",
        ),
    ),
    Mutation(
        "models/chip.py",
        "        if not self.library_has_bf16:\n            return None\n",
        "",
        "a chip's instructions count where torch's library does not use them",
        ("unit/models/test_chip.py::test_a_library_without_bfloat16_makes_a_chip_one_without",),
    ),
    Mutation(
        "engine/worker.py",
        "if own is not torch.bfloat16:",
        "if own is None:",
        "a float32 checkpoint loses its digits to what the chip is fast at",
        (
            "unit/engine/test_picked_dtypes.py::test_auto_is_bfloat16_where_the_checkpoint_is_and_the_chip_is_fast_at_it",
        ),
    ),
    Mutation(
        "bench/kernel_times.py",
        "agrees = bool((off <= allowed.atol + allowed.rtol * right.abs()).all())",
        "agrees = bool((off <= allowed.atol + allowed.rtol * right.abs()).any())",
        "a kernel with one right number agrees with its reference",
        (
            "unit/bench/test_kernels_bench.py::test_a_kernel_that_is_wrong_or_fails_is_said_to_and_stops_nobody",
        ),
    ),
    Mutation(
        "bench/kernel_attention.py",
        "seen = checked - torch.tensor(starts)[owner] + sequences.before + 1",
        "seen = checked - torch.tensor(starts)[owner] + 1",
        "attention over prompts is compared without what is before them",
        ("unit/bench/test_kernels_bench.py::test_every_kernel_of_a_layer_is_timed_and_compared",),
    ),
    Mutation(
        "bench/http_stream.py",
        '            self._body += b"\\n"  # the last line may have none\n',
        "",
        "the last token of a server that ends no line is not counted",
        ("unit/bench/test_serve_bench.py::test_b01_servers_that_are_not_ours_are_understood",),
    ),
    Mutation(
        "cli/bench_values.py",
        "    if not path.parent.is_dir():",
        "    if not path.parent.parent:",
        "a report's folder is found to be missing when all is measured",
        ("unit/bench/test_serve_bench.py::test_wrong_flags_are_named",),
    ),
    Mutation(
        "engine/loop.py",
        "in self._check.give_up():",
        "in self._check.give_up()[:0]:",
        "new weights are refused as long as a hit is being checked",
        (
            "unit/test_llm_weights.py::test_g06_r09_a_check_of_the_cache_does_not_hold_up_new_weights",
        ),
    ),
    Mutation(
        "runner/runner.py",
        "        # First: a load may fill what a restored state was copied from.\n"
        "        copy_within_device(plan.copies, self._arenas, after_model=False)\n"
        "        arrivals = self._mover.start(plan.adapters, plan.copies)\n",
        "        arrivals = self._mover.start(plan.adapters, plan.copies)\n"
        "        copy_within_device(plan.copies, self._arenas, after_model=False)\n",
        "a request goes on from the state that was loaded for another one",
        (
            "unit/runner/test_copies_of_a_step.py::test_h06_t01_a_state_is_restored_before_a_load_takes_its_place",
        ),
    ),
    Mutation(
        "scheduler/scheduler.py",
        "return self._cache.num_leases + num_retracted",
        "return self._cache.num_leases + 0 * num_retracted",
        "a retracted request ends its answer with other weights",
        ("unit/scheduler/test_scheduler.py::test_g06_who_was_retracted_has_begun",),
    ),
    # Foreign files
    Mutation(
        "models/qwen3_5.py",
        "shared_experts(reader, renormalises=True)",
        "shared_experts(reader, renormalises=False)",
        "the chosen experts of Qwen3.5 weigh less than one",
        (
            "unit/models/test_hybrids.py::"
            "test_a_checkpoint_with_images_gives_the_logits_of_its_text_model[qwen3.5-moe-False]",
        ),
    ),
    Mutation(
        "models/gguf_config.py",
        '"none" if factor == 1.0 else "linear"',
        '"none"',
        "a GGUF file's factor without a type is ignored",
        (
            "unit/models/test_gguf_loading.py::"
            "test_scaling_is_what_llama_cpp_takes_from_the_same_keys[metadata0-parameters0]",
        ),
    ),
    Mutation(
        "models/gguf_unread.py",
        "if value and value not in values and key not in form.reads:",
        "if False:",
        "a GGUF file's scale of logits is ignored",
        (
            "unit/models/test_gguf_loading.py::"
            "test_metadata_that_would_be_left_out_of_account_is_refused_by_name"
            "[llama-logit_scale-0.25-1.0]",
        ),
    ),
    Mutation(
        "text/chat.py",
        "if self._for_tools is not None and use.is_on and use.declarations:",
        "if False:",
        "a chat with tools is written by the template of plain chats",
        ("unit/text/test_chat.py::test_a_template_of_its_own_for_tools_is_used_with_tools_alone",),
    ),
    # Shown with real bytes
    Mutation(
        "store/storage_link.py",
        "self._storage.key(page, copy.family)",
        "self._storage.key(page, 0)",
        "families of one page overwrite each other in storage",
        (
            f"{REAL}namespaces.py::test_n08_n09_what_an_adapter_left_on_lower_tiers_comes_back_to_"
            "it_alone[five to one]",
        ),
    ),
    Mutation(
        "engine/kv_events.py",
        "[tuple(extra)] * len(hashes) if extra",
        "[tuple(extra)] if extra",
        "of pages that come together only the first says whose it is",
        (
            f"{REAL}namespaces.py::test_n11_p06_names_outside_of_the_process_carry_the_namespace_on"
            "_every_page[full]",
        ),
    ),
    Mutation(
        "store/device_copies.py",
        "copy_units(arenas[copy.family], copy.source_units, copy.target_units)",
        "copy_units(arenas[copy.family], copy.target_units, copy.source_units)",
        "a checkpoint overwrites the state that it should keep",
        (
            f"{REAL}families.py::test_h02_with_holes_in_any_family_a_request_resumes_where_all_of_"
            "them_can[convolutions-device]",
            f"{REAL}families.py::test_p10_a_publication_that_is_skipped_leaves_no_state_behind"
            "[device]",
        ),
    ),
    Mutation(
        "api/events.py",
        "    if not data.isascii():\n",
        "    if False:\n",
        "a stream's event is cut in two where a text has a line end of Unicode's own",
        (f"{HABITS}test_g04_an_event_is_one_line_for_whoever_reads_lines[/v1/completions]",),
    ),
    Mutation(
        "api/middleware.py",
        'message["type"] == "http.response.start" and self._is_draining()',
        "False",
        "callers keep their connections to a server that takes nothing new",
        ("unit/api/test_serving.py::test_while_draining",),
    ),
    Mutation(
        "api/preprocess.py",
        'return tokens[:wanted] if side == "right" else tokens[-wanted:]',
        "return tokens[:wanted]",
        "a prompt that is cut keeps its beginning",
        (f"{HABITS}test_g04_prompts_keep_their_last_tokens[3-3]",),
    ),
    Mutation(
        "engine/preparation.py",
        "self._scheduler.submit(waiting.submit, waiting.hold)",
        "self._scheduler.submit(waiting.submit)",
        "a request that waits for a grammar gets what its adapter's name means when that is there",
        (f"{GRAMMARS}test_g01_n13_who_waits_for_a_grammar_holds_the_adapter_it_came_for",),
    ),
    Mutation(
        "engine/preparation.py",
        "                self._scheduler.release_adapter(waiting.hold)",
        "                pass",
        "a grammar that can't be compiled keeps its request's adapter for good",
        (f"{GRAMMARS}test_g01_a_grammar_that_cannot_be_lets_go_of_the_adapter",),
    ),
    # What the tests of a ledger row once missed
    Mutation(
        "scheduler/admission.py",
        "while len(claimed) < (num_free or 1) and",
        "while len(claimed) < 1 and",
        "requests of one step are claimed one at a time",
        (f"{REUSE}test_c01_c07_room_for_one_request_of_a_step_costs_no_other_its_hit",),
    ),
    Mutation(
        "engine/tiers.py",
        'p.name == "config.json" or p.suffix in kinds',
        "p.suffix in kinds",
        "the same weights with another config find stored pages",
        (f"{TIERS}test_t02_t07_the_same_weights_with_another_config_find_nothing",),
    ),
    Mutation(
        "scheduler/plan_builder.py",
        "            self.num_tokens_left += 1\n",
        "            self.num_tokens_left += 3\n",
        "a decode that is taken back leaves two tokens too many to the budget",
        (f"{IMPORTANCE}test_c02_a_decode_that_is_taken_back_leaves_its_one_token_to_the_budget",),
    ),
    Mutation(
        "scheduler/admission.py",
        "is_open.pop(adapter, None)  # claiming may have closed it already",
        "is_open.clear()",
        "a request without room holds back every lane",
        (f"{ADAPTERS}test_l03_l04_a_request_without_room_holds_back_no_other_adapter",),
    ),
    Mutation(
        "scheduler/admission.py",
        "least = self._importance(request)",
        "pass",
        "less important requests begin while an important one finds no room",
        (
            f"{IMPORTANCE}"
            "test_l08_one_that_finds_no_room_keeps_the_less_important_of_other_adapters_out",
        ),
    ),
    Mutation(
        "scheduler/departures.py",
        "FinishReason.STOP: Ending.FINISHED",
        "FinishReason.STOP: Ending.DROPPED",
        "an answer that ends by a stop token loses its state",
        (
            "unit/test_llm_states.py::"
            "test_h05_h12_an_answer_that_ends_by_a_stop_token_keeps_its_state",
        ),
    ),
    Mutation(
        "scheduler/departures.py",
        "is_in_flight=request.num_in_flight_tokens > 0",
        "is_in_flight=False",
        "the slot of a paused request is given away while its step is in flight",
        (
            f"{ADAPTERS}test_w03_w05_w09_a_slot_keeps_its_weights_until_a_paused_requests_step_is_done",
        ),
    ),
    Mutation(
        "cache/cache.py",
        "self.costs.measured_load if is_whole else self.costs.measured_miss",
        "self.costs.measured_load",
        "misses count as quick loads",
        ("unit/cache/test_costs.py::test_t05_quick_misses_do_not_make_slow_storage_worth_asking",),
    ),
    Mutation(
        "cache/cache.py",
        "        known += [ns for ticket in self.prefetcher.tickets() for ns in "
        "ticket.key.namespaces]\n"
        "        return self._evict(dict.fromkeys(ns for ns in known if ns.adapter == digest))",
        "        return self._evict(dict.fromkeys(ns for ns in known if ns.adapter == digest))",
        "an unload does not bar an answer of storage that is still to come",
        (
            "unit/cache/test_namespaces.py::"
            "test_n12_n13_an_unload_bars_an_answer_of_a_namespace_that_has_nothing_else[adapter]",
        ),
    ),
    Mutation(
        "store/backends/redis.py",
        "pipe.set(_PREFIX + key, value, ex=self._ttl_s)",
        "pipe.set(_PREFIX + key, value)",
        "values in Redis have no time to live",
        (f"{BACKENDS}test_t02_a_value_in_redis_goes_so_long_after_its_last_use",),
    ),
    Mutation(
        "store/backends/redis.py",
        "return [answer is True for answer in answers]",
        "return [True for answer in answers]",
        "values that Redis refused count as written",
        (f"{BACKENDS}test_t03_t12_a_redis_that_refuses_a_part_says_which",),
    ),
    Mutation(
        "store/storage_link.py",
        "kept[wanted] = self._backend.put(values) if values else []",
        "kept[wanted] = [True for _ in self._backend.put(values)] if values else []",
        "values that storage refused count as written",
        (
            "unit/store/test_tier_copies.py::"
            "test_t03_t12_what_storage_refuses_is_not_reported_as_written",
            f"{TIERS}test_t03_t12_a_folder_without_room_takes_nothing_and_that_is_said",
        ),
    ),
    Mutation(
        "cache/storage_health.py",
        "if done.error is None and count < len(done.arrived):",
        "if done.error is None:",
        "storage that takes nothing is written to for ever",
        (f"{TIERS}test_t03_t12_a_folder_without_room_takes_nothing_and_that_is_said",),
    ),
    # Endings, states in storage, and arrivals beside long prompts
    Mutation(
        "scheduler/departures.py",
        "FinishReason.ABORT: Ending.LEFT",
        "FinishReason.ABORT: Ending.DROPPED",
        "an abort drops the states of its answer",
        (f"{ENDINGS}test_h05_an_abort_keeps_as_much_as_an_end_by_length[state-1]",),
    ),
    Mutation(
        "cache/cache.py",
        "is_worth = ending is Ending.LEFT or (ending is Ending.FINISHED and not is_passed)",
        "is_worth = ending is not Ending.DROPPED and not is_passed",
        "the older state of an answer is not published after an abort",
        (f"{ENDINGS}test_h05_an_abort_keeps_as_much_as_an_end_by_length[state-1]",),
    ),
    Mutation(
        "cache/prefetch.py",
        "if not plane.family.is_state or not is_led:",
        "if True:",
        "storage is asked for as many pages as the host has units for states",
        (f"{REAL}tiers.py::test_t06_{FEW_STATES}[mamba]",),
    ),
    Mutation(
        "cache/prefetch.py",
        "self._send(ticket, plane, end - num_states, end)",
        "self._send(ticket, plane, end - 1, end)",
        "a question for states takes one unit, however many there are",
        (OLDER_STATES,),
    ),
    Mutation(
        "cache/prefetch.py",
        "if has_states or ticket.num_questions == MOST_QUESTIONS:",
        "if ticket.num_questions:",
        "storage is asked for states once, whether or not one is there",
        (
            OLDER_STATES,
            f"{REAL}tiers.py::test_t06_{FEW_STATES}[mamba]",
        ),
    ),
    Mutation(
        "scheduler/scheduler.py",
        "first = self._admission.most_important",
        "first = 1 << 62",
        "a long prompt that is under way goes before an important arrival",
        (
            f"{IMPORTANCE}test_l08_an_important_arrival_comes_before_the_rest_of_a_long_prompt[priority]",
            f"{IMPORTANCE}test_l08_prompts_under_way_and_arrivals_share_a_step_by_importance",
        ),
    ),
    # Copies on several ranks, and bursts on layers with a state
    Mutation(
        "store/copy_ends.py",
        "np.logical_and.reduce(",
        "np.logical_or.reduce(",
        "a unit that one rank lacks counts as there",
        (f"{COPY_ENDS}test_t15_a_copy_has_ended_when_every_rank_has_ended_it[order0]",),
    ),
    Mutation(
        "store/copy_ends.py",
        "if len(ends) < self._num_ranks:",
        "if rank == 0 and False:",
        "a copy counts as ended when the first rank has ended it",
        (
            f"{COPY_ENDS}test_t15_a_copy_has_ended_when_every_rank_has_ended_it[order0]",
            f"{COPY_ENDS}test_t15_the_ranks_that_failed_are_named",
        ),
    ),
    Mutation(
        "scheduler/bursts.py",
        "            self.followers[request] = leader\n            return True\n",
        "            return False\n",
        "requests of a burst do not wait for the state of their prefix",
        (f"{STATE_BURSTS}test_p12_a_burst_computes_a_shared_prefix_once[state-1]",),
    ),
    Mutation(
        "scheduler/bursts.py",
        "end = min(end, one.key.common_run(other.key))",
        "pass",
        "requests wait for a prefix of another tenant",
        (f"{STATE_BURSTS}test_p12_n01_tenants_share_nothing",),
    ),
    Mutation(
        "scheduler/bursts.py",
        "                self._lead_from(num_done, leader, lease, waiting)\n",
        "                pass\n",
        "a burst shares no more than what all of it begins with",
        (f"{STATE_BURSTS}test_p12_prompts_that_share_more_among_themselves_share_that_too",),
    ),
    Mutation(
        "scheduler/admission.py",
        "if self.bursts.followers.pop(request, None) is not None:",
        "if False:",
        "a request that waits for another's prefix can't be aborted",
        (f"{STATE_BURSTS}test_p12_a_follower_that_is_aborted_leaves_nothing",),
    ),
    Mutation(
        "cache/publishing.py",
        "        filled[saved.family, saved.unit] = (node, boundary - 1)\n",
        "        pass\n",
        "a failed step leaves the state that it put after older pages",
        (
            "unit/cache/test_families.py::"
            "test_p03_p12_a_state_that_a_failed_step_put_behind_older_pages_is_taken_back",
        ),
    ),
    Mutation(
        "cache/tree.py",
        "        node.is_cut = True\n",
        "",
        "a copy in progress is taken for the page of another output, at the same depth",
        ("unit/cache/test_tree.py::test_t08_a_depth_in_a_node_never_comes_to_mean_another_page",),
    ),
    Mutation(
        "cache/tree.py",
        "        parent.is_cut = True\n",
        "",
        "an adapter's page is found below the base model's page that grew where its own had been",
        (
            "unit/cache/test_tree.py::"
            "test_n22_a_path_that_left_the_tree_is_not_mistaken_for_what_grows_in_its_place",
        ),
    ),
    Mutation(
        "cache/publishing.py",
        "            if saved.step_id == step_id:\n"
        "                self._saved.append((lease, saved))\n",
        "            self._announce_checkpoint(lease, saved)\n",
        "a step restores a state that it saves itself",
        (f"{STATE_BURSTS}test_c05_p12_a_step_restores_no_state_that_it_saves_itself",),
    ),
    Mutation(
        "cache/states.py",
        "        for family in due:\n",
        "        for family in due[:1]:\n",
        "one of two states is saved",
        (f"{STATE_BURSTS}test_p12_a_burst_computes_a_shared_prefix_once[two states-1]",),
    ),
)
