"""``rollwire gateway``: a fleet over HTTP, in the shapes of OpenAI's, vLLM's and SGLang's APIs.

an HTTP request ─▶ app (token, limits) ─▶ openai_api, vllm_api, sglang_api: the fields of its body
  ─▶ Sampler: n sequences on the fleet ─▶ answer: one JSON, or server-sent events
"""
