package fault

//go:generate go test -run TestErrorReferenceIsCurrent -update .

// The codes of the errors that the proxy sends. docs/reference/errors.md is generated from the comments: the status,
// what happened, and after "Fix:" what to do. Errors without a code are in that page's introduction.
const (
	// 401. The API key is missing, unknown or expired.
	// Fix: send one of `keys`; compare `printf %s "$KEY" | sha256sum` with the configuration.
	CodeInvalidAPIKey = "invalid_api_key"
	// 403. An operator cancelled the request.
	// Fix: ask the operator.
	CodeCancelled = "cancelled"
	// 404. No replica lists the model, or the key may not use it. A replica that is down keeps its models.
	// Fix: use a name in the message; try `curl URL/v1/models` for each replica.
	CodeModelNotFound = "model_not_found"
	// 404. Every replica of the model has responded within the last minute that it does not serve the endpoint.
	// Fix: start a replica that serves it; `missing_endpoints` in `/api/state` lists what each one lacks.
	CodeEndpointNotServed = "endpoint_not_served"
	// 404. Unknown path. The message has the path that was probably meant, for instance where `/v1` is there twice.
	// Fix: end the client's base URL with `/v1`. Operators' paths of vLLM are not forwarded.
	CodeNotFound = "not_found"
	// 404. No replica has the stored response in the path: it is unknown, belongs to another key, or was lost when its
	// replica was restarted or removed.
	// Fix: none; make the response again.
	CodeResponseNotFound = "response_not_found"
	// 404. The same for `previous_response_id`.
	// Fix: send the whole conversation as input.
	CodePreviousResponseNotFound = "previous_response_not_found"
	// 405. The path requires another method, which `Allow` names.
	// Fix: correct the client.
	CodeMethodNotAllowed = "method_not_allowed"
	// 408. No byte of the body arrived for `timeouts.body_idle`, or less than 1 KiB a second over that time.
	// Fix: check the client's network.
	CodeBodyTimeout = "body_timeout"
	// 413. The body exceeds `limits.body_bytes`; the message has the limit.
	// Fix: send less, or raise it and `limits.body_bytes_total`.
	CodeBodyTooLarge = "body_too_large"
	// 414. The query exceeds `limits.query_bytes`.
	// Fix: correct the client.
	CodeQueryTooLong = "query_too_long"
	// 415. The body is compressed (`Content-Encoding`), which replicas do not read.
	// Fix: turn off request compression in the client.
	CodeUnsupportedEncoding = "unsupported_content_encoding"
	// 426. WebSocket is not served.
	// Fix: none; Codex tries it first and then uses HTTP.
	CodeUpgradeRequired = "upgrade_required"
	// 429. The key exceeds one of its limits.
	// Fix: wait for `Retry-After`, or raise the limits of the key.
	CodeRateLimitExceeded = "rate_limit_exceeded"
	// 429. The part of the admission queue for this priority class is full, and this key or client address has an equal share of it.
	// Fix: add replicas; or raise `routing.queue.requests` and `.bytes`, for low-priority requests `.low_priority_requests` and
	// `.low_priority_bytes`, if clients can wait.
	CodeQueueFull = "queue_full"
	// 429. Replicas worked, but none had room within `routing.queue.busy_timeout`, or the key's `queue_time`.
	// Fix: add replicas, raise the time, or shorten prompts that need more KV cache than is ever free.
	CodeBusy = "busy"
	// 429. With `slo.refuse`: no replica is predicted to send the first token of the request within its target, `X-Llm-D-Slo-Ttft-Ms`,
	// `keys[].slo_ttft` or `slo.ttft`.
	// Fix: raise the target, shorten the prompt, or try again with fewer requests; or set `slo.refuse: false`.
	CodeTTFTUnreachable = "ttft_unreachable"
	// 429. Every replica has `max_in_flight` requests, and the admission queue is off.
	// Fix: raise it, or set `routing.queue.requests`.
	CodeReplicasFull = "replicas_full"
	// 431. The header has more than 256 lines.
	// Fix: send fewer headers.
	CodeTooManyHeaders = "too_many_headers"
	// 500. A bug of warmroute: the decision where to send the queued request panicked.
	// Fix: report it with the stack in the proxy's log.
	CodeInternalError = "internal_error"
	// 502. The replica crashed, closed the response early, ended a stream without a mark of its end or sent an invalid
	// response, and no other could be tried; or it was removed, and the response took longer than `timeouts.shutdown`.
	// Fix: see the replica's log and `warmroute_retries_total`.
	CodeReplicaFailed = "replica_failed"
	// 503 before the response has begun, 502 after it. The replica's engine aborted the request, and no other could
	// serve it.
	// Fix: retry; start replicas with `--shutdown-timeout`.
	CodeReplicaAborted = "replica_aborted"
	// 503. No ready replica serves the model, or none has listed its models since the start.
	// Fix: `warmroute backends list` has the reason for each replica.
	CodeNoneReady = "none_ready"
	// 503. The proxy had no file descriptor for a connection to a replica for `routing.queue.none_ready_timeout`.
	// Fix: raise the limit (`ulimit -n`, `LimitNOFILE=`).
	CodeOutOfDescriptors = "out_of_descriptors"
	// 503. `limits.in_flight` requests are in flight, or nine tenths of it for a low-priority request.
	// The message says if it is this key or client address that has too many requests whose bodies are incomplete.
	// Fix: add proxies, or raise the limit and that of file descriptors; name load balancers in `trusted_proxies`.
	CodeTooManyRequests = "too_many_requests"
	// 503. Request bodies use all of `limits.body_bytes_total`, or this key or client address uses its share of it; the
	// message says which.
	// Fix: raise the limit if there is memory, or lower `limits.in_flight`; name load balancers in `trusted_proxies`.
	CodeBodiesTooLarge = "bodies_too_large"
	// 503. The proxy is stopping and ended the request after `timeouts.shutdown`; or it is `/readyz` during `timeouts.serve_after_term`.
	// Fix: retry; raise `timeouts.shutdown`.
	codeShuttingDown = "shutting_down"
	// 504. The first event of a stream took longer than `timeouts.first_byte`.
	// Fix: raise it if prompts take that long; else check the replica.
	codeFirstByteTimeout = "first_byte_timeout"
	// 504. A request that is not streamed had no response, and its replica no progress, for `timeouts.response`.
	// Fix: restart the replica; raise the time where replicas have no `/metrics`.
	codeResponseTimeout = "response_timeout"
	// 504. The response stopped for `timeouts.idle`.
	// Fix: the replica is stalled: restart it.
	CodeIdleTimeout = "idle_timeout"
	// 504. The replica is stalled, and no other could take the request.
	// Fix: restart it.
	codeReplicaStalled = "replica_stalled"
	// 508. The request has passed this proxy before, or more than about 18 proxies.
	// Fix: remove the backend that leads back to a proxy in front of it.
	CodeLoopDetected = "loop_detected"
)
