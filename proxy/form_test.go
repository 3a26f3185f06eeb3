package proxy

import (
	"bytes"
	"mime/multipart"
	"net/http"
	"strings"
	"testing"
)

// upload is a form with an audio file and the fields given as name, value, …
func upload(t testing.TB, fields ...string) (contentType, body string) {
	var b bytes.Buffer
	w := multipart.NewWriter(&b)
	audio, err := w.CreateFormFile("file", "speech.wav")
	if err != nil {
		t.Fatal(err)
	}
	audio.Write(bytes.Repeat([]byte("RIFF\x00\r\n--\xff\xfe"), 10_000))
	for i := 0; i < len(fields); i += 2 {
		w.WriteField(fields[i], fields[i+1])
	}
	w.Close()
	return w.FormDataContentType(), b.String()
}

func TestUploadGoesUpAsItIs(t *testing.T) {
	whisper := &replica{models: []string{"whisper"}, script: always(answered("200 OK", `{"text":"hi"}`))}
	chat := &replica{models: []string{"chat"}, script: always(answered("200 OK", "wrong"))}
	f := serve(t, nil, chat, whisper)
	kind, body := upload(t, "language", "en", "model", " whisper\n", "response_format", "json")
	for i, path := range []string{"/v1/audio/transcriptions", "/v1/audio/translations"} {
		resp, answer, err := f.upload(path, kind, body)
		if err != nil || resp.StatusCode != http.StatusOK || answer != `{"text":"hi"}` {
			t.Fatalf("got %v %s", resp, answer)
		}
		if got := whisper.requests()[i]; got.body != body || got.Header.Get("Content-Type") != kind || got.RequestURI != path {
			t.Errorf("the upload was changed")
		}
	}
}

func TestUploadThatStreams(t *testing.T) {
	events := `data: {"object":"transcription.chunk","choices":[{"delta":{"content":"hi"}}]}` + "\n\n" + doneLine
	f := serve(t, nil, &replica{script: once()}, &replica{script: always(streamed(events))})
	kind, body := upload(t, "model", "m", "stream", "true")
	if _, got, err := f.upload("/v1/audio/transcriptions", kind, body); got != events {
		t.Errorf("got %q, %v", got, err)
	}
}

func TestUploadsModel(t *testing.T) {
	r := &replica{script: always(answered("200 OK", "{}"))}
	f := serve(t, nil, r)
	for _, c := range []struct {
		name   string
		fields []string
		status int
	}{
		{"named", []string{"model", "m"}, 200},
		{"not named", nil, 200},
		{"empty", []string{"model", ""}, 200},
		{"unknown", []string{"model", "x"}, 404},
		{"twice", []string{"model", "m", "model", "x"}, 400},
		{"twice, far apart", append(append([]string{"model", "m"}, strings.Fields(strings.Repeat("a b ", 200))...), "model", "x"), 400},
		{"endless", []string{"model", strings.Repeat("m", 100_000)}, 404},
	} {
		kind, body := upload(t, c.fields...)
		resp, answer, err := f.upload("/v1/audio/transcriptions", kind, body)
		if err != nil || resp.StatusCode != c.status {
			t.Errorf("%s: got %v %.200s, want %d", c.name, resp.Status, answer, c.status)
		}
		if c.status != 200 {
			refused(t, answer)
		}
	}
	before := len(r.requests())
	if resp, answer, _ := f.upload("/v1/audio/transcriptions", "multipart/form-data; boundary=x", ""); resp.StatusCode != http.StatusBadRequest {
		t.Errorf("empty: got %d %s", resp.StatusCode, answer)
	}
	if len(r.requests()) != before {
		t.Error("the backend was bothered with an empty form")
	}
	// A form that we cannot read is the replica's to refuse.
	if resp, _, _ := f.upload("/v1/audio/transcriptions", "text/plain", "hello"); resp.StatusCode != http.StatusOK {
		t.Errorf("unreadable: got %d", resp.StatusCode)
	}
}

func (f *fleet) upload(path, contentType, body string) (*http.Response, string, error) {
	return f.try(path, body, "Content-Type", contentType)
}

func FuzzFormModel(f *testing.F) {
	kind, body := upload(f, "model", "m")
	f.Add(kind, []byte(body), "m")
	kind, body = upload(f, "model", "a", "model", "b")
	f.Add(kind, []byte(body), "")
	f.Add("multipart/form-data; boundary=x", []byte("--x\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nm\r\n--x--"), "x y")
	f.Add("multipart/form-data; boundary=\"", []byte("--"), "\x00")
	f.Fuzz(func(t *testing.T, contentType string, body []byte, name string) {
		if model, twice, _ := formModel(contentType, body); len(model) > longestFormName || twice && model != "" {
			t.Errorf("model %q, twice %v", model, twice)
		}
		kind, form := upload(t, "before", name, "model", name, "after", name)
		if model, twice, whole := formModel(kind, []byte(form)); twice || !whole || len(name) < longestFormName && model != strings.TrimSpace(name) {
			t.Errorf("%q was read as %q", name, model)
		}
	})
}
