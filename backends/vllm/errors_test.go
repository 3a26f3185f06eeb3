package vllm

import (
	"fmt"
	"net/http"
	"os"
	"strconv"
	"strings"
	"testing"
)

func errorJSON(message string) string {
	return `{"error":{"message":` + strconv.Quote(message) + `,"type":"InternalServerError","code":500}}`
}

// messagesEvent is the error event of /v1/messages that vLLM 0.32 makes of an error event of a chat.
func messagesEvent(quoted string) string {
	invalid := `[type=missing, input_value=` + quoted + `, input_type=dict]` +
		"\n    For further information visit https://errors.pydantic.dev/2.14/v/missing"
	return `{"type":"error","error":{"type":"internal_error","message":` +
		strconv.Quote("2 validation errors for ChatCompletionStreamResponse\nmodel\n  Field required "+invalid+"\nchoices\n  Field required "+
			invalid) + `}}`
}

// TestErrorMeaning has the errors of vLLM, SGLang and gateways as the body of an HTTP response and, where the status is 0, as an event.
func TestErrorMeaning(t *testing.T) {
	const (
		busy    = "The engine is currently busy and cannot accept new requests. Please try again later or on a different instance."
		backlog = "The engine has reached its prefill token backlog limit. Please try again later or on a different instance."
		scaling = `{"error":"The model is currently scaling. Please try again later."}`
		retired = `{"error": "This engine (rank 3) has been retired and is awaiting shutdown."}`
		failed  = `{"type":"response.failed","response":{"status":"failed","error":{"code":"%","message":"m"}}}`
	)
	refused := func(message, kind string, status int) string {
		return fmt.Sprintf(`{"error":{"message":%q,"type":%q,"param":null,"code":%d}}`, message, kind, status)
	}
	for _, c := range []struct {
		status int
		body   string
		want   ErrorMeaning
	}{
		// vLLM 0.32: --max-num-queued-reqs, --max-num-queued-tokens.
		{503, refused(busy, "Service Unavailable", 503), ErrorQueueFull},
		{0, refused(busy, "Service Unavailable", 503), ErrorQueueFull},
		{0, refused(backlog, "Service Unavailable", 503), ErrorQueueFull},
		{503, `{"type":"error","error":{"type":"Service Unavailable","message":"` + busy + `"}}`, ErrorQueueFull},
		{0, messagesEvent(`{'error': {'message': 'Th...am': None, 'code': 503}}`), ErrorQueueFull},
		{0, `{"type":"error","error":{"type":"internal_error","message":"` + busy + `"}}`, ErrorQueueFull},
		{0, refused("Request failed; please retry", "ServiceUnavailableError", 503), ErrorQueueFull},
		// SGLang.
		{0, `{"error": {"object":"error","message":"The request queue is full.","type":"SERVICE_UNAVAILABLE","param":null,"code":503}}`,
			ErrorQueueFull},
		{0, `{"type":"error","error":{"type":"overloaded_error","message":"m"}}`, ErrorQueueFull},
		{0, `{"type":"error","code":"503","message":"m","sequence_number":2}`, ErrorQueueFull},
		{503, "", ErrorQueueFull},
		{503, "no healthy upstream", ErrorQueueFull},
		// A refusal with a 429, which vllm-project/vllm pull 49330 proposes, has the status as its type, as any that vLLM 0.32 sends before
		// the engine gets a request.
		{429, refused(busy, "Too Many Requests", 429), ErrorQueueFull},
		{0, refused(backlog, "Too Many Requests", 429), ErrorQueueFull},
		{429, refused(busy, "rate_limit_error", 429), ErrorOfRequest},
		{429, refused("Rate limit reached for given tier.", "Too Many Requests", 429), ErrorOfRequest},
		{429, refused("Why: "+busy, "Too Many Requests", 429), ErrorOfRequest},
		{0, refused("slow down", "Too Many Requests", 429), ErrorOfRequest},
		{0, `{"type":"error","error":{"type":"rate_limit_error","message":"m"}}`, ErrorOfRequest},
		{429, "slow down", ErrorOfRequest},

		{500, errorJSON("cannot schedule new futures after shutdown"), ErrorShutdown},
		{0, errorJSON("cannot schedule new futures after interpreter shutdown"), ErrorShutdown},
		{0, errorJSON("Server shutting down"), ErrorShutdown},
		{503, errorJSON("Server shutting down"), ErrorShutdown},
		{0, `{"type":"error","error":{"type":"internal_error","message":"cannot schedule new futures after shutdown"}}`, ErrorShutdown},
		{0, `{"type":"response.failed","response":{"error":{"code":"server_error","message":"Server shutting down"}}}`, ErrorShutdown},
		{400, errorJSON("Server shutting down"), ErrorOfRequest},
		{0, `{"type":"error","code":null,"message":"Server shutting down","sequence_number":0}`, ErrorShutdown},
		{500, `{"message":"Server shutting down"}`, ErrorOfEngine},
		{500, `x ` + errorJSON("Server shutting down"), ErrorOfEngine},

		{503, scaling, ErrorScaling},
		{0, scaling, ErrorScaling},
		{0, retired, ErrorScaling},
		{0, errorJSON("The model is currently scaling."), ErrorOfEngine},

		{500, errorJSON("EngineCore encountered an issue. See stack trace (above) for the root cause."), ErrorOfEngine},
		{0, errorJSON("EngineCore encountered an issue. See stack trace (above) for the root cause."), ErrorOfEngine},
		{0, messagesEvent(`{'error': {'message': 'En...am': None, 'code': 500}}`), ErrorOfEngine},
		{0, `{"error":{"message":"m"}}`, ErrorOfEngine},
		{0, `{"error":{"message":"m","code":"7"}}`, ErrorOfEngine},
		{0, `{"error":"cannot schedule new futures after shutdown"}`, ErrorOfEngine},
		{0, `{"type":"error","error":{"type":"api_error","message":"m"}}`, ErrorOfEngine},
		{0, `{"type":"error","code":null,"message":"m"}`, ErrorOfEngine},
		{0, strings.Replace(failed, "%", "server_error", 1), ErrorOfEngine},
		{0, strings.Replace(failed, "%", "vector_store_timeout", 1), ErrorOfEngine},
		{0, `{"type":"response.failed","response":{"error":null}}`, ErrorOfEngine},
		{500, "", ErrorOfEngine},

		{502, "", ErrorOfGateway},
		{504, "", ErrorOfGateway},
		{0, `{"error":{"message":"m","code":502}}`, ErrorOfGateway},
		{0, `{"type":"error","error":{"type":"timeout_error","message":"m"}}`, ErrorOfGateway},

		{400, errorJSON("m"), ErrorOfRequest},
		{0, `{"error":{"message":"This model's maximum context length is 8 tokens.","type":"BadRequestError","code":400}}`, ErrorOfRequest},
		{0, messagesEvent(`{'error': {'message': 'Th...en': None, 'code': 400}}`), ErrorOfRequest},
		{0, `{"type":"error","error":{"type":"invalid_request_error","message":"m"}}`, ErrorOfRequest},
		{0, strings.Replace(failed, "%", "invalid_prompt", 1), ErrorOfRequest},
		{0, strings.Replace(failed, "%", "rate_limit_exceeded", 1), ErrorOfRequest},
		{0, strings.Replace(failed, "%", "unsupported_image_media_type", 1), ErrorOfRequest},
		{501, "", ErrorOfRequest},
		{0, `{"error":{"message":"m","code":501}}`, ErrorOfRequest},
	} {
		status := c.status
		if status == 0 {
			status = ErrorEventStatus([]byte(c.body))
		}
		if got := ClassifyError(status, []byte(c.body)); got != c.want {
			t.Errorf("%d (%d) %s: %v, want %v", c.status, status, c.body, got, c.want)
		}
	}
}

func TestIsScalingError(t *testing.T) {
	for body, want := range map[string]bool{
		`{"error":"The model is currently scaling. Please try again later."}`:             true,
		`{"error": "This engine (rank 3) has been retired and is awaiting shutdown."}`:    true,
		`{"error":{"message":"The model is currently scaling. Please try again later."}}`: false,
		`{"error":"overloaded"}`: false,
		`{"detail":"The model is currently scaling. Please try again later."}`:         false,
		`x {"error":"The model is currently scaling. Please try again later."}`:        false,
		`{"error":"The model is currently scaling` + strings.Repeat(" ", 1<<10) + `"}`: false,
		``: false,
	} {
		if got := IsScalingError(http.StatusServiceUnavailable, []byte(body)); got != want {
			t.Errorf("%s: %v", body, got)
		}
		if IsScalingError(http.StatusInternalServerError, []byte(body)) {
			t.Errorf("%s with another status", body)
		}
	}
}

// TestIsContextLengthError reads the errors in testdata/context-length.txt.
func TestIsContextLengthError(t *testing.T) {
	recorded, err := os.ReadFile("testdata/context-length.txt")
	if err != nil {
		t.Fatal(err)
	}
	versions := map[string]int{}
	for line := range strings.Lines(string(recorded)) {
		if strings.HasPrefix(line, "#") {
			continue
		}
		fields := strings.Split(strings.TrimSpace(line), "\t")
		if len(fields) != 3 {
			t.Fatalf("a line of %d fields: %s", len(fields), line)
		}
		versions[fields[0]]++
		if !IsContextLengthError([]byte(fields[2])) {
			t.Errorf("%s %s: not recognized: %s", fields[0], fields[1], fields[2])
		}
	}
	if versions["0.32"] < 15 {
		t.Errorf("only %d errors of vLLM 0.32", versions["0.32"])
	}
	for _, body := range []string{
		errorJSON("min_tokens must be less than or equal to max_tokens=5, got 9."),
		errorJSON("truncate_prompt_tokens=2000 cannot be greater than max_model_len = 1024. Please request a smaller truncation size."),
		errorJSON("truncate_prompt_tokens value is greater than max_model_len. Please request a smaller truncation size."),
		errorJSON("max_tokens=5 is bad, as is what you say: it cannot be greater than max_model_len=1024."),
		errorJSON("max_tokens=5"),
		errorJSON("1 validation error: messages: 'This model's maximum context length is 4096 tokens.'"),
		`{"error":"This model's maximum context length is 4096 tokens."}`,
		`{"error":{"message":["This model's maximum context length is 4096 tokens."]}}`,
		`x {"error":{"message":"This model's maximum context length is 4096 tokens."}}`,
		`{"detail":"Not Found"}`, `{}`, `[]`, ``,
	} {
		if IsContextLengthError([]byte(body)) {
			t.Errorf("taken for one: %s", body)
		}
	}
}

func TestIsMissingEndpoint(t *testing.T) {
	const disabled = `{"error":{"message":"Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them.",` +
		`"type":"PermissionDeniedError","param":null,"code":403}}`
	for _, c := range []struct {
		status int
		body   string
		want   bool
	}{
		{404, `{"detail":"Not Found"}`, true},
		{404, "", true},
		{404, " \n", true},
		{403, disabled, true},
		{404, disabled, false},
		{403, "", false},
		{403, errorJSON("not allowed"), false},
		{403, errorJSON("why does it say: Scale-out endpoints are disabled."), false},
		{404, `{"error":{"message":"The model x does not exist.","type":"NotFoundError","param":"model","code":404}}`, false},
		{404, `{"error":{"message":"Response with id 'x' not found.","type":"invalid_request_error","param":"response_id","code":404}}`, false},
		{404, `{"detail":"Item not found"}`, false},
		{404, `{"detail":["Not Found"]}`, false},
		{404, "404 page not found", false},
		{404, `{"detail":"Not Found"}` + strings.Repeat(" ", 2000), false},
		{405, `{"detail":"Method Not Allowed"}`, false},
		{500, "", false},
		{200, "", false},
	} {
		if got := IsMissingEndpoint(c.status, []byte(c.body)); got != c.want {
			t.Errorf("%d %.60s: %v, want %v", c.status, c.body, got, c.want)
		}
	}
}
