package vllm

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	"github.com/tidwall/gjson"
)

// Call is a POST to vLLM's control API, which changes the state of a server.
type Call struct {
	Path  string
	Query url.Values
	Body  []byte // JSON; nil: none

	variable string // the environment variable with which vLLM serves the path
	check    func(body []byte) error
}

// The environment variables with which vLLM serves its control API.
const (
	devMode         = "VLLM_SERVER_DEV_MODE"
	adapterUpdating = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
)

// What vLLM does with requests in flight when it pauses or goes to sleep. Requests that arrive
// afterwards wait in any case.
const (
	ModeAbort = "abort" // end them with finish_reason "abort"
	ModeWait  = "wait"  // wait for their ends
	ModeKeep  = "keep"  // continue them afterwards
)

// The levels of sleep.
const (
	SleepScheduler = 0 // memory stays as it is
	SleepOffload   = 1 // weights move to the host's memory, the KV cache is lost
	SleepDiscard   = 2 // weights are lost too, and have to be loaded again after wake_up
)

// Sleep puts the engine to sleep.
func Sleep(level int, mode string) Call {
	return Call{Path: "/sleep", Query: url.Values{"level": {strconv.Itoa(level)}, "mode": {mode}}, variable: devMode}
}

// WakeUp wakes the parts of a sleeping engine that tags name, all of them without tags. The call
// fails with ErrStillAsleep if other parts sleep on.
func WakeUp(tags []string) Call {
	return Call{Path: "/wake_up", Query: url.Values{"tags": tags}, variable: devMode, check: checkAwake}
}

// Pause stops the engine after its current step. clearCache empties the prefix cache.
func Pause(mode string, clearCache bool) Call {
	return Call{Path: "/pause", Query: url.Values{"mode": {mode}, "clear_cache": {strconv.FormatBool(clearCache)}}, variable: devMode}
}

// Resume ends a Pause.
func Resume() Call { return Call{Path: "/resume", variable: devMode} }

// ResetPrefixCache empties the prefix cache. The call fails with ErrBlocksInUse while requests run, unless
// preempt: then those are computed again.
func ResetPrefixCache(preempt bool) Call {
	return Call{Path: "/reset_prefix_cache", Query: url.Values{"reset_running_requests": {strconv.FormatBool(preempt)}}, variable: devMode,
		check: checkReset}
}

// LoadAdapter loads a LoRA adapter from a path of the replica's machine, or whatever vLLM accepts as one.
// inPlace replaces one of the same name.
func LoadAdapter(name, path string, inPlace bool) Call {
	body, _ := json.Marshal(struct { // strings always marshal
		Name    string `json:"lora_name"`
		Path    string `json:"lora_path"`
		InPlace bool   `json:"load_inplace"`
	}{name, path, inPlace})
	return Call{Path: "/v1/load_lora_adapter", Body: body, variable: adapterUpdating}
}

// UnloadAdapter unloads a LoRA adapter. Its requests in flight continue.
func UnloadAdapter(name string) Call {
	body, _ := json.Marshal(struct {
		Name string `json:"lora_name"`
	}{name})
	return Call{Path: "/v1/unload_lora_adapter", Body: body, variable: adapterUpdating}
}

// Why a Call has not done what it should although the response's status is 200.
var (
	ErrBlocksInUse = errors.New("the prefix cache was not reset: requests or transfers use its blocks")
	ErrStillAsleep = errors.New("parts of the engine are still asleep")
)

// checkReset reads {"success": bool}. Versions without it have an empty body.
func checkReset(body []byte) error {
	if gjson.GetBytes(body, "success").Type == gjson.False {
		return ErrBlocksInUse
	}
	return nil
}

// checkAwake reads {"status": "awake" or "sleeping"}. Versions without it have an empty body.
func checkAwake(body []byte) error {
	if gjson.GetBytes(body, "status").Str == "sleeping" {
		return ErrStillAsleep
	}
	return nil
}

// MaxCallResponseBytes bounds the responses to a Call.
const MaxCallResponseBytes = 64 << 10

// Check returns nil if the server has done what the call asks for by its response, and otherwise an error that
// says what to do.
func (c *Call) Check(status int, body []byte) error {
	message := errorMessage(body)
	switch {
	case status == http.StatusOK && c.check != nil:
		return c.check(body)
	case status >= 200 && status < 300:
		return nil
	case status == http.StatusUnauthorized, status == http.StatusForbidden:
		return fmt.Errorf("%s returned %d; set the backend's api_key to the replica's", c.Path, status)
	case (status == http.StatusNotFound || status == http.StatusMethodNotAllowed) && gjson.GetBytes(body, "error.message").Str == "":
		return fmt.Errorf("%s returned %d: the replica does not serve it; start vLLM with %s=1", c.Path, status, c.variable)
	case message == "":
		return fmt.Errorf("%s returned %d", c.Path, status)
	}
	return fmt.Errorf("%s returned %d: %s", c.Path, status, message)
}

// maxMessageBytes bounds what is shown of an error.
const maxMessageBytes = 500

// errorMessage returns the message of an error response, "" if there is none: vLLM has several shapes.
func errorMessage(body []byte) string {
	if !gjson.ValidBytes(body) {
		return ""
	}
	in := gjson.ParseBytes(body)
	message := cmp.Or(in.Get("error.message").Str, in.Get("error").Str, in.Get("detail").Str, in.Get("message").Str)
	if len(message) > maxMessageBytes {
		message = message[:maxMessageBytes] + "…"
	}
	return strings.ToValidUTF8(message, "\uFFFD")
}

// ParsePaused returns whether a response to GET /is_paused says that the engine is paused.
func ParsePaused(body []byte) (paused bool, err error) {
	var state struct {
		IsPaused *bool `json:"is_paused"`
	}
	if err := json.Unmarshal(body, &state); err != nil {
		return false, err
	}
	if state.IsPaused == nil {
		return false, errors.New("is_paused is missing")
	}
	return *state.IsPaused, nil
}
