package loadgen

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"warmroute/clock"
	"warmroute/lab/replay"
)

const (
	maxRecordedLineBytes = 16 << 20
	maxRecordedMillis    = 365 * 24 * 3600 * 1000 // a year
)

// RecordedSession is a session of a real agent, with the text of its requests.
type RecordedSession struct {
	Agent string
	Name  string
	// Turns are its requests in the order in which they were sent. The recording has no time of responses, so Think is the time
	// between the starts of two requests and includes the recorded response.
	Turns []Turn
}

// recordedCall is a line of a recording.
type recordedCall struct {
	Agent       string `json:"agent"`
	Session     string `json:"session"`
	TimestampMS int64  `json:"timestamp_ms"`
	Input       string `json:"input"`
	Output      string `json:"output"`
}

// ReadRecordedSessions reads a recording with a JSON object on each line: agent, session, timestamp_ms, and the prompt and the
// output as one string each (input, output). Lines of a session need not be in order. Those without input, whose prompt was not
// recorded, are left out. It returns the sessions in the order of their first lines. Its errors name the line.
func ReadRecordedSessions(r io.Reader) ([]RecordedSession, error) {
	var order []recordedCall // the first call of each session
	calls := map[recordedCall][]recordedCall{}
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, maxRecordedLineBytes)
	n := 0
	for lines.Scan() {
		n++
		var call recordedCall
		if err := json.Unmarshal(lines.Bytes(), &call); err != nil {
			return nil, fmt.Errorf("line %d: %w", n, err)
		}
		switch {
		case call.Session == "":
			return nil, fmt.Errorf("line %d has no session", n)
		case call.TimestampMS < -maxRecordedMillis || call.TimestampMS > maxRecordedMillis:
			return nil, fmt.Errorf("line %d: timestamp_ms %d is more than a year from the session's start", n, call.TimestampMS)
		}
		if call.Input == "" { // a prompt with images
			continue
		}
		key := recordedCall{Agent: call.Agent, Session: call.Session}
		if calls[key] == nil {
			order = append(order, key)
		}
		calls[key] = append(calls[key], call)
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("line %d: %w", n+1, err)
	}
	if len(order) == 0 {
		return nil, errors.New("recording without requests")
	}
	sessions := make([]RecordedSession, len(order))
	for i, key := range order {
		sessions[i] = RecordedSession{Agent: key.Agent, Name: key.Session, Turns: recordedTurns(calls[key])}
	}
	return sessions, nil
}

// recordedTurns sorts the calls of a session and returns them as chats.
func recordedTurns(calls []recordedCall) []Turn {
	slices.SortStableFunc(calls, func(a, b recordedCall) int { return cmp.Compare(a.TimestampMS, b.TimestampMS) })
	turns := make([]Turn, len(calls))
	for i, call := range calls {
		turns[i] = Turn{Messages: recordedMessages(calls[:i], turns[:i], call.Input), OutputTokens: max(1, countTokens(call.Output))}
		if i > 0 {
			turns[i].Think = time.Duration(call.TimestampMS-calls[i-1].TimestampMS) * time.Millisecond
		}
	}
	return turns
}

func countTokens(text string) int {
	return (len(text) + replay.CharsPerToken - 1) / replay.CharsPerToken
}

var roleMark = regexp.MustCompile(`(?:^|\n\n)(system|user|assistant): `)

// recordedMessages returns a prompt as the messages of a chat. Where the text names their roles, it is split there. Other
// recordings join what the user and the tools said and leave out the rest: a prompt that begins with an earlier one of its
// session continues that, so it has the messages of that one, its output, and what follows.
func recordedMessages(earlier []recordedCall, turns []Turn, input string) []Message {
	marks := roleMark.FindAllStringSubmatchIndex(input, -1)
	if len(marks) > 0 && marks[0][0] == 0 {
		messages := make([]Message, len(marks))
		for i, mark := range marks {
			end := len(input)
			if i+1 < len(marks) {
				end = marks[i+1][0]
			}
			messages[i] = Message{Role: input[mark[2]:mark[3]], Content: input[mark[1]:end]}
		}
		return messages
	}
	longest := -1
	for i, call := range earlier {
		if strings.HasPrefix(input, call.Input) && (longest < 0 || len(call.Input) >= len(earlier[longest].Input)) {
			longest = i
		}
	}
	if longest < 0 {
		return []Message{{Role: "user", Content: input}}
	}
	previous := earlier[longest]
	if len(input) == len(previous.Input) {
		return turns[longest].Messages
	}
	messages := slices.Clone(turns[longest].Messages)
	if previous.Output != "" {
		messages = append(messages, Message{Role: "assistant", Content: previous.Output})
	}
	return append(messages, Message{Role: "user", Content: strings.TrimPrefix(input[len(previous.Input):], "\n\n")})
}

// RunRecorded plays sessions in their order, atOnce at a time: each request follows the response to the one before and the pause
// of the recording. A failed request ends its session. sessionHeader names a header with the session's name; "": none. It returns
// when all have ended or ctx has. OnResult is not called.
func (c *Client) RunRecorded(ctx context.Context, sessions []RecordedSession, atOnce int, sessionHeader string) []AgentRun {
	runs := make([]AgentRun, len(sessions))
	var next atomic.Int64
	var playing sync.WaitGroup
	for range atOnce {
		playing.Go(func() {
			for i := int(next.Add(1)) - 1; i < len(sessions) && ctx.Err() == nil; i = int(next.Add(1)) - 1 {
				runs[i] = c.runRecordedSession(ctx, &sessions[i], sessionHeader)
			}
		})
	}
	playing.Wait()
	return runs
}

func (c *Client) runRecordedSession(ctx context.Context, s *RecordedSession, sessionHeader string) AgentRun {
	run := AgentRun{Agent: s.Agent}
	var header http.Header
	if sessionHeader != "" {
		header = http.Header{http.CanonicalHeaderKey(sessionHeader): {s.Name}}
	}
	start := time.Now()
	for _, turn := range s.Turns {
		if !clock.Sleep(ctx, c.toWallTime(turn.Think)) {
			break
		}
		r := c.Send(ctx, Request{Body: ChatBody(c.Model, turn, true), Stream: true, Header: header})
		run.Results = append(run.Results, r.Result)
		run.Task = c.toModelTime(time.Since(start))
		if r.Err != "" {
			break
		}
	}
	return run
}
