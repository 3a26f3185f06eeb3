package admin

import (
	"bufio"
	"compress/gzip"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"warmroute/proxy/recorder"
)

func TestRecording(t *testing.T) {
	a := askable(t)
	recordings, err := recorder.New(recorder.Options{Settings: recorder.Settings{Memory: 1 << 20}, BlockBytes: 256, Dropped: func() {}})
	if err != nil {
		t.Fatal(err)
	}
	a.handler.Recorder = recordings
	q := recordings.NewRequest()
	q.Arrived, q.Model, q.Bytes, q.Code = time.Now(), "m", 1000, 200
	recordings.Enqueue(q)
	ended, end := context.WithCancel(t.Context())
	end()
	recordings.Run(ended) // it writes what is queued

	for _, encoding := range []string{"gzip", "identity"} {
		req, err := http.NewRequestWithContext(t.Context(), "GET", a.url+"/api/recording", nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Accept-Encoding", encoding)
		resp, err := http.DefaultTransport.RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		var body io.Reader = resp.Body
		if got := resp.Header.Get("Content-Encoding"); (encoding == "gzip") != (got == "gzip") {
			t.Errorf("%s: Content-Encoding %q", encoding, got)
		} else if got == "gzip" {
			if body, err = gzip.NewReader(body); err != nil {
				t.Fatal(err)
			}
		}
		lines := bufio.NewScanner(body)
		lines.Scan()
		var header RecordingHeader
		if err := json.Unmarshal(lines.Bytes(), &header); err != nil {
			t.Fatal(err)
		}
		if len(header.Backends) != len(a.fleet) || !strings.HasPrefix(lines.Text(), `{"warmroute_record":2,`) {
			t.Fatalf("%s: got %s", encoding, lines.Text())
		}
		for i, b := range header.Backends {
			if b.Step.Rate <= 0 || len(b.Models) != 1 || b.Models[0] != 0 {
				t.Errorf("%s: backend %d: %+v", encoding, i, b)
			}
		}
		if !lines.Scan() || !strings.Contains(lines.Text(), `"input_bytes":1000`) || lines.Scan() {
			t.Errorf("%s: got %s", encoding, lines.Text())
		}
	}

	a.handler.Recorder = nil
	if status, text := a.ask("GET", "/api/recording"); status != 404 || !strings.Contains(text, "set recording.memory and restart") {
		t.Errorf("without a recorder: %d %s", status, text)
	}
}
