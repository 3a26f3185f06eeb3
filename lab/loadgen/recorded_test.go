package loadgen

import (
	"reflect"
	"strings"
	"testing"
	"time"

	"warmroute/lab/sim"
	"warmroute/lab/sim/engine"
)

func TestReadRecordedSessions(t *testing.T) {
	sessions, err := ReadRecordedSessions(strings.NewReader(`
{"agent":"a","session":"1","timestamp_ms":500,"input":"Task.\n\nFirst result.","output":"Done."}
{"agent":"b","session":"1","timestamp_ms":0,"input":"system: Be short.\n\nuser: Hello\n\nassistant: Hi\n\nuser: Why?","output":""}
{"agent":"a","session":"1","timestamp_ms":-100,"input":"Task.","output":"I look."}
{"agent":"a","session":"1","timestamp_ms":0,"input":"Task.","output":"I look again."}
{"agent":"a","session":"1","timestamp_ms":200,"input":"","output":"The page shows a form."}
`[1:]))
	if err != nil {
		t.Fatal(err)
	}
	user := func(text string) Message { return Message{Role: "user", Content: text} }
	task := []Message{user("Task.")}
	want := []RecordedSession{
		{Agent: "a", Name: "1", Turns: []Turn{
			{Messages: task, OutputTokens: 2},
			{Messages: task, OutputTokens: 4, Think: 100 * time.Millisecond},
			{
				Messages:     []Message{task[0], {Role: "assistant", Content: "I look again."}, user("First result.")},
				OutputTokens: 2, Think: 500 * time.Millisecond,
			},
		}},
		{Agent: "b", Name: "1", Turns: []Turn{{
			Messages:     []Message{{Role: "system", Content: "Be short."}, user("Hello"), {Role: "assistant", Content: "Hi"}, user("Why?")},
			OutputTokens: 1,
		}}},
	}
	if !reflect.DeepEqual(sessions, want) {
		t.Errorf("got  %+v\nwant %+v", sessions, want)
	}
}

func TestReadRecordedSessionsErrors(t *testing.T) {
	const good = `{"agent":"a","session":"1","input":"x"}` + "\n"
	for recording, want := range map[string]string{
		"":                                  "without requests",
		good + "{":                          "line 2",
		good + "\n":                         "line 2",
		`{"input":"x"}`:                     "no session",
		`{"session":"1"`:                    "line 1",
		`{"session":"1","input":""}`:        "without requests",
		good + `{"session":"","input":"y"}`: "line 2",
		`{"session":"1","input":"x","timestamp_ms":9223372036854775807}`:       "a year",
		`{"session":"1","input":"x","timestamp_ms":-99999999999}`:              "a year",
		`{"session":"1","input":"x","timestamp_ms":0.5}`:                       "line 1",
		`{"session":"1","input":"` + strings.Repeat("x", maxRecordedLineBytes): "token too long",
	} {
		_, err := ReadRecordedSessions(strings.NewReader(recording))
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.60s: error %v, want %q", recording, err, want)
		}
	}
}

// FuzzReadRecordedSessions checks what players of sessions rely on.
func FuzzReadRecordedSessions(f *testing.F) {
	f.Add(`{"agent":"a","session":"1","timestamp_ms":5,"input":"user: x\n\nassistant: y","output":"z"}
{"agent":"a","session":"1","timestamp_ms":-5,"input":"user: x","output":""}`)
	f.Add(`{"session":"1","input":"x","output":"y"}
{"session":"1","input":"xz","timestamp_ms":31536000000}`)
	f.Fuzz(func(t *testing.T, recording string) {
		sessions, err := ReadRecordedSessions(strings.NewReader(recording))
		if err != nil {
			return
		}
		for _, s := range sessions {
			if len(s.Turns) == 0 {
				t.Errorf("session %q has no requests", s.Name)
			}
			for i, turn := range s.Turns {
				if turn.Think < 0 || i == 0 && turn.Think != 0 || turn.OutputTokens < 1 || len(turn.Messages) == 0 {
					t.Errorf("request %d of session %q: %+v", i, s.Name, turn)
				}
			}
		}
	})
}

// TestRunRecorded plays sessions on one replica, which has each earlier prompt cached, and refuses a prompt above its context.
func TestRunRecorded(t *testing.T) {
	replica := startReplica(t, sim.Config{Engine: engine.Config{Speed: 100}, MaxModelLen: 2000})
	httpClient := NewHTTPClient()
	defer httpClient.CloseIdleConnections()
	client := &Client{URL: replica.URL(), Model: "sim", HTTP: httpClient, Speed: 100, Timeout: failsafe}
	prompt := func(name string, tokens int) []Message {
		return []Message{{Role: "user", Content: seededText(name, 0, tokens)}}
	}
	grown := append(prompt("a", 1000), Message{Role: "assistant", Content: "ok"}, Message{Role: "user", Content: "go on"})
	runs := client.RunRecorded(t.Context(), []RecordedSession{
		{Agent: "a", Turns: []Turn{
			{Messages: prompt("a", 1000), OutputTokens: 3},
			{Messages: grown, OutputTokens: 5, Think: time.Second},
		}},
		{Agent: "b", Turns: []Turn{{Messages: prompt("b", 2500), OutputTokens: 1}, {Messages: prompt("c", 10), OutputTokens: 1}}},
	}, 1, "x-session-id")
	if a := runs[0]; a.Agent != "a" || len(a.Results) != 2 || a.Task < time.Second {
		t.Fatalf("%+v", a)
	}
	for i, want := range []struct{ cached, completion int }{{0, 3}, {1000, 5}} {
		if r := runs[0].Results[i]; r.Err != "" || r.CachedTokens < want.cached-16 || r.CompletionTokens != want.completion {
			t.Errorf("request %d: %+v, want %d tokens cached and %d generated", i, r, want.cached, want.completion)
		}
	}
	if b := runs[1]; b.Agent != "b" || len(b.Results) != 1 || b.Results[0].Err != "status 400" {
		t.Errorf("%+v, want the refused request alone", b)
	}
}
