package prompt

import (
	"strings"
	"testing"

	"github.com/zeebo/xxh3"
)

func TestSession(t *testing.T) {
	const m = `"messages":[]`
	long := strings.Repeat("s", MaxConversationBytes)
	for _, c := range []struct {
		kind        Kind
		body        string
		name, field string
	}{
		{Chat, `{` + m + `}`, "", ""},
		{Chat, `{"user":"u","prompt_cache_key":"k","session_id":"s",` + m + `}`, "k", "prompt_cache_key"},
		{Chat, `{"prompt_cache_key":"","session_id":"s",` + m + `}`, "s", "session_id"},
		{Chat, `{"prompt_cache_key":null,"session_id":7,` + m + `}`, "", ""},
		{Chat, `{"metadata":{"user_id":"user_1_account__session_s"},` + m + `}`, "", ""},
		{Completion, `{"prompt":"p","session_id":"s"}`, "s", "session_id"},
		{Responses, `{"prompt_cache_key":"\u006b","input":"p"}`, "k", "prompt_cache_key"},
		{Other, `{"session_id":"s"}`, "s", "session_id"},
		{Chat, `{"session_id":"` + long + `t",` + m + `}`, long, "session_id"},
		{Messages, `{"metadata":{"user_id":"user_1_account_2_session_s"},` + m + `}`, "s", "metadata.user_id"},
		{Messages, `{"metadata":{"user_id":"{\"device_id\":\"d\",\"account_uuid\":\"\",\"session_id\":\"s\"}"},` + m + `}`, "s",
			"metadata.user_id"},
		{Messages, `{"metadata":{"user_id":"{\"session_id\" : \"s\", \"device_id\": \"d\"}"},` + m + `}`, "s", "metadata.user_id"},
		{Messages, `{"metadata":{"user_id":"{\"session_id\":7}"},` + m + `}`, "", ""},
		{Messages, `{"metadata":{"user_id":"{\"session_id\""},` + m + `}`, "", ""},
		{Messages, `{"metadata":{"user_id":"{\"session_id\":\"s"},` + m + `}`, "s", "metadata.user_id"},
		{Messages, `{"metadata":{"user_id":"someone"},` + m + `}`, "", ""},
		{Messages, `{"metadata":{"user_id":["_session_s"]},` + m + `}`, "", ""},
		{Messages, `{"metadata":"_session_s",` + m + `}`, "", ""},
		{Messages, `{"session_id":"a","metadata":{"user_id":"user_1_account_2_session_s"},` + m + `}`, "a", "session_id"},
	} {
		want := uint64(0)
		if c.name != "" {
			want = xxh3.HashString(c.name)
		}
		if p := parse(t, c.kind, c.body); p.Conversation != want || p.ConversationField != c.field {
			t.Errorf("%.120s: session %x of %q, want %x (%.20s) of %q", c.body, p.Conversation, p.ConversationField, want, c.name, c.field)
		}
	}
}
