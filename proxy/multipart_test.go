package proxy

import (
	"bytes"
	"io"
	"mime"
	"mime/multipart"
	"net/http"
	"strings"
	"testing"

	"warmroute/proxy/admit"
	"warmroute/proxy/apikey"
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

func TestUploadRelayedUnchanged(t *testing.T) {
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

func TestUploadStream(t *testing.T) {
	events := `data: {"object":"transcription.chunk","choices":[{"delta":{"content":"hi"}}]}` + "\n\n" + doneLine
	f := serve(t, nil, &replica{script: once()}, &replica{script: always(streamed(events))})
	kind, body := upload(t, "model", "m", "stream", "true")
	if _, got, err := f.upload("/v1/audio/transcriptions", kind, body); got != events {
		t.Errorf("got %q, %v", got, err)
	}
}

func TestUploadModel(t *testing.T) {
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
	if resp, answer, _ := f.upload("/v1/audio/transcriptions", "multipart/form-data; boundary=x",
		""); resp.StatusCode != http.StatusBadRequest {
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

// asGoReads is the last field "model" of a form, as mime/multipart has it. ok is false if that cannot read a
// parameter of the form or of a part.
func asGoReads(contentType string, body []byte) (model string, ok bool) {
	_, params, err := mime.ParseMediaType(contentType)
	if err != nil {
		return "", false
	}
	form := multipart.NewReader(bytes.NewReader(body), params["boundary"])
	for {
		part, err := form.NextRawPart()
		if err != nil {
			return model, true
		}
		if _, _, err := mime.ParseMediaType(part.Header.Get("Content-Disposition")); err != nil {
			return "", false
		}
		if part.FormName() == "model" {
			value, _ := io.ReadAll(part)
			model = string(bytes.TrimSpace(value))
		}
	}
}

// What one reader of forms finds another model in than the next one, or could.
func TestAmbiguousFormRejected(t *testing.T) {
	r := &replica{models: []string{"m", "lora<m"}, script: always(answered("200 OK", "{}"))}
	f := serve(t, withKeys(keyOf("all", nil), keyOf("some", func(k *apikey.Key) { k.Models = []string{"m"} })), r)
	const kind = "multipart/form-data; boundary=x"
	part := func(header, value string) string { return "--x\r\n" + header + "\r\n\r\n" + value + "\r\n" }
	field := func(params, value string) string { return part("Content-Disposition: form-data; "+params, value) }
	const end = "--x--\r\n"
	m := field(`name="model"`, "m")
	for name, c := range map[string]struct{ kind, body string }{
		"two lines": {kind,
			m + part("Content-Disposition: form-data; name=\"x\"\r\nContent-Disposition: form-data; name=\"model\"", "lora") + end},
		"two lines, another case": {kind,
			m + part("Content-Disposition: form-data; name=\"x\"\r\ncontent-DISPOSITION: form-data; name=\"model\"", "lora") + end},
		"two names":                      {kind, m + field(`name="x"; name="model"`, "lora") + end},
		"two names, another case":        {kind, m + field(`name="x"; NAME=model`, "lora") + end},
		"name*":                          {kind, m + field(`name="x"; name*=utf-8''model`, "lora") + end},
		"name* alone":                    {kind, m + field(`name*=utf-8''model`, "lora") + end},
		"name in pieces":                 {kind, m + field(`name*0="mo"; name*1="del"`, "lora") + end},
		"quoted pair":                    {kind, m + field(`name="mo\del"`, "lora") + end},
		"quotation's end":                {kind, m + field(`name="x"; filename="\\"; a="; name=model; b="`, "lora") + end},
		"quotation's end, as Python has": {kind, m + field(`name="x"; filename="a\\\"; name=model; b=\""`, "lora") + end},
		"no quotation's end":             {kind, m + field(`name="x`, "lora") + end},
		"no name":                        {kind, m + field(`a="model"`, "lora") + end},
		"no form-data":                   {kind, m + part(`Content-Disposition: attachment; name="model"`, "lora") + end},
		"no disposition":                 {kind, m + part("X-A: b", "lora") + end},
		"no header":                      {kind, m + part("", "lora") + end},
		"folded": {kind,
			m + part("X-A: b\r\n Content-Disposition: form-data; name=\"model\"\r\nContent-Disposition: form-data; name=\"x\"", "lora") + end},
		"folded parameter": {kind, m + part("Content-Disposition: form-data;\r\n name=\"model\"", "lora") + end},
		"LF in a header":   {kind, m + part("Content-Disposition: form-data; name=\"x\"\nX: ; name=\"model\"", "lora") + end},
		"CR in a header": {kind,
			m + part("Content-Disposition: form-data; name=\"x\"\rContent-Disposition: form-data; name=\"model\"", "lora") + end},
		"blank before the colon":     {kind, m + part("Content-Disposition : form-data; name=\"model\"", "lora") + end},
		"blank behind the boundary":  {kind, m + strings.Replace(field(`name="model"`, "lora"), "--x", "--x ", 1) + end},
		"more behind the boundary":   {kind, m + "--xy\r\n" + field(`name="model"`, "lora") + end},
		"boundary behind the header": {kind, strings.TrimSuffix(field(`name="x"`, ""), "\r\n") + field(`name="model"`, "lora") + end},
		"boundary in a header": {"multipart/form-data; boundary=\"x:y\"",
			"--x:y\r\nContent-Disposition: form-data; name=\"x\"\r\n--x:y\r\nA: b\r\n\r\nlora\r\n--x:y--"},
		"LF lines":            {kind, strings.ReplaceAll(m+end, "\r\n", "\n")},
		"preamble":            {kind, "hello\r\n" + m + end},
		"an end that is none": {kind, m + "--x--y\r\n" + field(`name="model"`, "lora") + end},
		"no end":              {kind, m},
		"encoded": {kind, part("Content-Disposition: form-data; name=\"model\"\r\nContent-Transfer-Encoding: base64",
			"bQ==") + end},
		"encoded and not": {kind,
			part("Content-Transfer-Encoding: quoted-printable\r\nContent-Transfer-Encoding: 8bit\r\nContent-Disposition: form-data; name=\"model\"",
				"=6d") + end},
		"CR before the first boundary":  {kind, "\r" + m + end},
		"text behind an empty line":     {kind, "\r\nhello\r\n" + m + end},
		"two parameters without quotes": {kind, m + field(`name="x"; filename=a name=model`, "lora") + end},
		"quotes in a value":             {kind, m + field(`name="x"; filename=a"; name=model; b="`, "lora") + end},
		"single quotes":                 {kind, m + field(`name='model'`, "lora") + end},
		"another charset's letters":     {kind + "; charset=iso-8859-1", field(`name="model"`, "lor\xe9") + end},
		"two charsets":                  {kind + "; charset=utf-8; charset=utf-16", m + end},
		"charset without ASCII":         {kind + "; charset=cp037", m + end},
		"two boundaries":                {kind + "; boundary=y", m + end},
		"boundary*":                     {kind + "; boundary*=utf-8''y", m + end},
		"boundary with a blank":         {`multipart/form-data; boundary="x "`, strings.ReplaceAll(m+end, "--x", "--x ")},
		"charset with escapes":          {kind + "; charset=utf-7", m + field(`name="+AG0-odel"`, "lora") + end},
		"another multipart":             {"multipart/mixed; boundary=x", m + end},
		"no boundary":                   {"multipart/form-data", m + end},
		"too many parts":                {kind, m + strings.Repeat(field(`name="x"`, ""), admit.MaxFormParts) + end},
		"a long header":                 {kind, m + field(`name="x"; filename="`+strings.Repeat("x", admit.MaxPartHeaderBytes)+`"`, "") + end},
	} {
		for _, key := range []string{"all", "some"} {
			resp, answer, err := f.try("/v1/audio/transcriptions", c.body, append(bearer(key), "Content-Type", c.kind)...)
			if err != nil || resp.StatusCode != http.StatusBadRequest {
				t.Errorf("%s: the key for %s got %v %s", name, key, resp, answer)
				continue
			}
			refused(t, answer)
		}
	}
	for name, c := range map[string]struct{ kind, body string }{
		"plain":            {kind, m + end},
		"no name's quotes": {kind, field(`name=model`, "m") + end},
		"blanks":           {kind, field(` name = "model" ;`, "m") + end},
		"case":             {"Multipart/Form-Data; Boundary=x", part(`CONTENT-disposition: Form-Data; Name="model"`, "m") + end},
		"a file's names":   {kind, field(`name="file"; filename="_.wav"; filename*=utf-8''%D1%8F.wav`, "RIFF\r\n-x\n--x\n") + m + end},
		"a file's letters": {kind, field(`name="file"; filename="я \" C:\x.wav"`, "RIFF") + m + end},
		"other headers": {kind, part("content-type: text/plain; charset=utf-8\r\nContent-Disposition:form-data; "+
			"name=\"model\"\r\nContent-Transfer-Encoding: 8bit\r\nContent-Length: 1", "m") + end},
		"charset": {kind + "; charset=UTF-8", m + end},
		"a form in a part": {kind, m + part("Content-Disposition: form-data; name=\"x\"\r\nContent-Type: multipart/mixed; boundary=y",
			"--y\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nlora\r\n--y--") + end},
		"behind the end":    {kind, m + end + field(`name="model"`, "lora")},
		"no line's end":     {kind, m + "--x--"},
		"quoted boundary":   {`multipart/form-data; boundary="x"`, m + end},
		"model in the name": {kind, field(`name="Model"`, "lora") + m + end},
		// Each of these is read by starlette 1.10 with python-multipart 0.0.34 as the model m.
		"Latin-1":              {kind + "; charset=ISO-8859-1", m + end},
		"Latin-1 first":        {"multipart/form-data; charset=\"iso-8859-1\"; boundary=x", m + end},
		"ASCII":                {kind + ";charset=US-ASCII", m + end},
		"Windows-1252, a file": {kind + "; charset=windows-1252", field(`name="file"; filename="\xfc.wav"`, "\xff\xfe") + m + end},
		"part in Latin-1": {kind, part("Content-Disposition: form-data; name=\"model\"\r\nContent-Type: text/plain; "+
			"charset=ISO-8859-1\r\nContent-Transfer-Encoding: 8bit", "m") + end},
		"empty lines first": {kind, "\r\n\r\n" + m + end},
		"LF first":          {kind, "\n" + m + end},
		"a file's encoding": {kind, part("Content-Disposition: form-data; name=\"file\"; "+
			"filename=\"a\"\r\nContent-Transfer-Encoding: base64", "UklGRg==") + m + end},
		"a field's encoding": {kind,
			part("Content-Disposition: form-data; name=\"language\"\r\nContent-Transfer-Encoding: quoted-printable", "en") + m + end},
		"file name without quotes": {kind, field(`name=file; filename=speech of today.wav`, "RIFF") + m + end},
		"file name's signs":        {kind, field(`name=file; filename=[a]@b,c/d=я.wav`, "RIFF") + m + end},
		"LF last":                  {kind, m + "--x--\n"},
		"text behind LF":           {kind, m + "--x--\n--x\r\nhello"},
		"blanks last":              {kind, m + "--x-- \t\r\n"},
		"boundary of Java":         {"multipart/form-data; boundary=----=_Part_0_1.2", strings.ReplaceAll(m+end, "--x", "------=_Part_0_1.2")},
		"boundary's signs":         {"multipart/form-data; boundary=a/b:(c)?'", strings.ReplaceAll(m+end, "--x", "--a/b:(c)?'")},
		"semicolon":                {kind + "; ", m + end},
	} {
		resp, answer, err := f.try("/v1/audio/transcriptions", c.body, append(bearer("some"), "Content-Type", c.kind)...)
		if err != nil || resp.StatusCode != http.StatusOK {
			t.Errorf("%s: got %v %s", name, resp, answer)
		}
	}
}

func FuzzFormModel(f *testing.F) {
	kind, body := upload(f, "model", "m")
	f.Add(kind, []byte(body), "m")
	kind, body = upload(f, "model", "a", "model", "b")
	f.Add(kind, []byte(body), "")
	f.Add("multipart/form-data; boundary=x", []byte("--x\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nm\r\n--x--"), "x y")
	f.Add("multipart/form-data; boundary=\"", []byte("--"), "\x00")
	f.Fuzz(func(t *testing.T, contentType string, body []byte, name string) {
		fields, err := admit.ParseForm([]string{contentType}, body)
		model := fields.Model
		if len(model) > admit.MaxFormNameBytes || err != nil && model != "" {
			t.Errorf("model %q, %v", model, err)
		}
		if other, ok := asGoReads(contentType, body); ok && err == nil && len(model) < admit.MaxFormNameBytes && model != other {
			t.Errorf("model %q, where Go's own reader finds %q", model, other)
		}
		kind, form := upload(t, "before", name, "model", name, "after", name)
		if fields, err := admit.ParseForm([]string{kind}, []byte(form)); err != nil || len(name) < admit.MaxFormNameBytes &&
			fields.Model != strings.TrimSpace(name) {
			t.Errorf("%q was read as %q, %v", name, fields.Model, err)
		}
	})
}
