package vllm

import (
	"errors"
	"strings"
	"testing"
)

// The responses are those of vLLM 0.32.
func TestCheckCall(t *testing.T) {
	for _, c := range []struct {
		call   Call
		status int
		body   string
		want   string // in the error; "": none
	}{
		{Sleep(SleepOffload, ModeAbort), 200, `{"status":"sleeping","level":1}`, ""},
		{Sleep(SleepOffload, ModeAbort), 404, `{"detail":"Not Found"}`, "start vLLM with VLLM_SERVER_DEV_MODE=1"},
		{Sleep(SleepOffload, ModeAbort), 405, `{"detail":"Method Not Allowed"}`, "start vLLM with VLLM_SERVER_DEV_MODE=1"},
		{Sleep(SleepOffload, ModeAbort), 404, ``, "start vLLM with VLLM_SERVER_DEV_MODE=1"},
		{Sleep(3, ModeAbort), 400, `{"error":{"message":"1 validation error:\n  {'type': 'less_than_equal'}","type":"Bad Request",` +
			`"param":"query.level","code":400}}`, "/sleep returned 400: 1 validation error"},
		{Pause(ModeWait, false), 500, `{"error":"Failed to pause generation: x"}`, "/pause returned 500: Failed to pause generation: x"},
		{Resume(), 503, `<html>`, "/resume returned 503"},
		{WakeUp(nil), 200, `{"status":"awake","tags":null}`, ""},
		{WakeUp([]string{"weights"}), 200, `{"status":"sleeping","tags":["weights"]}`, ErrStillAsleep.Error()},
		{WakeUp(nil), 200, ``, ""}, // older versions
		{ResetPrefixCache(false), 200, `{"success":true}`, ""},
		{ResetPrefixCache(false), 200, `{"success":false}`, ErrBlocksInUse.Error()},
		{ResetPrefixCache(false), 200, ``, ""},
		{LoadAdapter("a", "/a", false), 200, `Success: LoRA adapter 'a' added successfully.`, ""},
		{LoadAdapter("a", "/a", false), 401, `{"error":"Unauthorized"}`, "set the backend's api_key"},
		{LoadAdapter("a", "/a", false), 404, `{"detail":"Not Found"}`, "start vLLM with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"},
		{LoadAdapter("a", "/a", false), 404, `{"error":{"message":"Loading lora a failed: No adapter found for <path>","type":"NotFoundError",` +
			`"param":null,"code":404}}`, "404: Loading lora a failed"},
		{LoadAdapter("a", "/a", false), 500, `{"error":{"message":"Call to add_lora method failed: LoRA is not enabled. Use --enable-lora to ` +
			`enable LoRA.","type":"InternalServerError","param":null,"code":500}}`, "Use --enable-lora"},
		{UnloadAdapter("a"), 404, `{"error":{"message":"The lora adapter 'a' cannot be found.","type":"NotFoundError","param":null,"code":404}}`,
			"cannot be found"},
		{Resume(), 500, `{"error":"` + strings.Repeat("x", 5000) + `"}`, "xxx…"},
	} {
		err := c.call.Check(c.status, []byte(c.body))
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s, %d %.80s: %v, want %q", c.call.Path, c.status, c.body, err, c.want)
		}
	}
	call := ResetPrefixCache(true)
	if err := call.Check(200, []byte(`{"success":false}`)); !errors.Is(err, ErrBlocksInUse) {
		t.Error(err)
	}
}

func TestCalls(t *testing.T) {
	for _, c := range []struct {
		call        Call
		path, query string
		body        string
	}{
		{Sleep(SleepDiscard, ModeWait), "/sleep", "level=2&mode=wait", ""},
		{WakeUp(nil), "/wake_up", "", ""},
		{WakeUp([]string{"weights", "kv_cache"}), "/wake_up", "tags=weights&tags=kv_cache", ""},
		{Pause(ModeKeep, false), "/pause", "clear_cache=false&mode=keep", ""},
		{Resume(), "/resume", "", ""},
		{ResetPrefixCache(true), "/reset_prefix_cache", "reset_running_requests=true", ""},
		{LoadAdapter(`a"b`, "/a", true), "/v1/load_lora_adapter", "", `{"lora_name":"a\"b","lora_path":"/a","load_inplace":true}`},
		{UnloadAdapter("a"), "/v1/unload_lora_adapter", "", `{"lora_name":"a"}`},
	} {
		if c.call.Path != c.path || c.call.Query.Encode() != c.query || string(c.call.Body) != c.body {
			t.Errorf("%s?%s %s, want %+v", c.call.Path, c.call.Query.Encode(), c.call.Body, c)
		}
	}
}

func FuzzCheckCall(f *testing.F) {
	f.Add(200, []byte(`{"success":false}`))
	f.Add(404, []byte(`{"detail":"Not Found"}`))
	f.Add(500, []byte(`{"error":{"message":"é"}}`))
	f.Fuzz(func(t *testing.T, status int, body []byte) {
		for _, call := range []Call{ResetPrefixCache(false), WakeUp(nil), LoadAdapter("a", "b", false)} {
			if err := call.Check(status, body); err != nil && len(err.Error()) > 2*maxMessageBytes {
				t.Errorf("an error of %d bytes", len(err.Error()))
			}
		}
	})
}

func TestParsePaused(t *testing.T) {
	for body, want := range map[string]struct{ paused, ok bool }{
		`{"is_paused":true}`:          {true, true},
		`{"is_paused": false, "x":1}`: {false, true},
		`{}`:                          {},
		`{"is_paused":null}`:          {},
		`{"is_paused":"true"}`:        {},
		`true`:                        {},
		`<html>`:                      {},
		``:                            {},
	} {
		if paused, err := ParsePaused([]byte(body)); paused != want.paused || (err == nil) != want.ok {
			t.Errorf("%s: %v, %v", body, paused, err)
		}
	}
}
