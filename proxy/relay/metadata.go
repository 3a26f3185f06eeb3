package relay

import (
	"bytes"

	"github.com/tidwall/gjson"

	"warmroute/proxy/api"
)

const (
	maxReasons     = 16 // choices whose finish reasons are kept
	maxReasonBytes = 32
)

// Metadata is what a response says of itself, for its trace. A nil Metadata reads nothing.
type Metadata struct {
	ID, Model     string   // as the replica wrote them
	FinishReasons []string // of the choices, by index; "": not known
}

// AddBody reads a response, or the beginning of one. A response that is still running in the background has no finish reason.
func (m *Metadata) AddBody(f api.Format, body []byte) {
	if m == nil {
		return
	}
	object := gjson.ParseBytes(body)
	m.setIDAndModel(object)
	switch {
	case f.HasChoices():
		m.addChoices(object)
	case f == api.ResponsesFormat:
		m.addEndOfResponse(object)
	case f == api.MessagesFormat:
		m.addReason(0, object.Get("stop_reason"))
	}
}

// addEvent reads an event of a stream. Most are not parsed.
func (m *Metadata) addEvent(f api.Format, event []byte) {
	if m.ID == "" {
		m.readIDAndModel(f, event)
	}
	switch {
	case f.HasChoices():
		if hasFinishReason(event) {
			m.addChoices(gjson.ParseBytes(event))
		}
	case f == api.ResponsesFormat:
		if bytes.Contains(event, []byte(`"response":`)) {
			m.addEndOfResponse(gjson.GetBytes(event, "response"))
		}
	case f == api.MessagesFormat:
		if bytes.Contains(event, []byte(`"stop_reason"`)) {
			m.addReason(0, gjson.GetBytes(event, "delta.stop_reason"))
		}
	}
}

// readIDAndModel sets the id and the model from an event of a stream, if it has them.
func (m *Metadata) readIDAndModel(f api.Format, event []byte) {
	switch f {
	case api.ResponsesFormat, api.StoredFormat:
		m.setIDAndModel(gjson.GetBytes(event, "response"))
	case api.MessagesFormat:
		m.setIDAndModel(gjson.GetBytes(event, "message"))
	default:
		m.setIDAndModel(gjson.ParseBytes(event))
	}
}

func (m *Metadata) setIDAndModel(object gjson.Result) {
	for _, key := range [...]string{"id", "request_id"} {
		if id := object.Get(key); id.Type == gjson.String && m.ID == "" {
			m.ID = id.Str
		}
	}
	if model := object.Get("model"); model.Type == gjson.String {
		m.Model = model.Str
	}
}

func (m *Metadata) addChoices(object gjson.Result) {
	object.Get("choices").ForEach(func(_, choice gjson.Result) bool {
		m.addReason(choice.Get("index").Int(), choice.Get("finish_reason"))
		return true
	})
}

// addEndOfResponse reads why an object of /v1/responses is incomplete, else how it ended.
func (m *Metadata) addEndOfResponse(response gjson.Result) {
	switch status := response.Get("status"); status.Str {
	case "incomplete":
		if reason := response.Get("incomplete_details.reason"); reason.Type == gjson.String {
			status = reason
		}
		fallthrough
	case "completed", "failed", "cancelled":
		m.addReason(0, status)
	}
}

// addReason sets the finish reason of a choice, if it is a word: no other text of a response gets into a trace.
func (m *Metadata) addReason(choice int64, reason gjson.Result) {
	if choice < 0 || choice >= maxReasons || reason.Type != gjson.String || !isWord(reason.Str) {
		return
	}
	for int64(len(m.FinishReasons)) <= choice {
		m.FinishReasons = append(m.FinishReasons, "")
	}
	m.FinishReasons[choice] = reason.Str
}

// isWord reports whether s has letters, digits and underscores only, and not many.
func isWord(s string) bool {
	for _, c := range []byte(s) {
		if (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (c < '0' || c > '9') && c != '_' {
			return false
		}
	}
	return len(s) > 0 && len(s) <= maxReasonBytes
}
