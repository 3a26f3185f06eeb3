import com.openai.client.OpenAIClient;
import com.openai.client.okhttp.OpenAIOkHttpClient;
import com.openai.models.audio.transcriptions.TranscriptionCreateParams;
import com.openai.models.chat.completions.ChatCompletionCreateParams;
import com.sun.net.httpserver.HttpExchange;
import com.sun.net.httpserver.HttpServer;
import java.io.IOException;
import java.net.InetAddress;
import java.net.InetSocketAddress;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.List;

/**
 * A chat, a streamed chat and a transcription with OpenAI's SDK for Java, whose forms have a charset. The chats go to
 * the proxy of scripts/sdk/run. The transcription goes to a proxy of its own, since its replica has no audio model.
 */
public class SDKTest {
    private static final String AUDIO_PROXY = "127.0.0.1:18196";

    public static void main(String[] args) throws Exception {
        testChat(client(System.getenv("PROXY_URL")));
        testTranscription();
    }

    private static void testChat(OpenAIClient client) {
        var chat = ChatCompletionCreateParams.builder()
            .model("tiny").addUserMessage("What is the capital of France?").maxCompletionTokens(16).build();
        check("chat", client.chat().completions().create(chat).usage().orElseThrow().completionTokens() > 0);
        try (var stream = client.chat().completions().createStreaming(chat)) {
            List<?> reasons = stream.stream()
                .flatMap(chunk -> chunk.choices().stream())
                .flatMap(choice -> choice.finishReason().stream())
                .toList();
            check("streamed chat: finish reasons " + reasons, reasons.size() == 1);
        }
    }

    private static void testTranscription() throws Exception {
        HttpServer replica = HttpServer.create(new InetSocketAddress(InetAddress.getLoopbackAddress(), 0), 0);
        replica.createContext("/health", exchange -> respond(exchange, ""));
        replica.createContext("/v1/models",
            exchange -> respond(exchange, "{\"object\":\"list\",\"data\":[{\"id\":\"whisper\",\"object\":\"model\"}]}"));
        replica.createContext("/v1/audio/transcriptions", exchange -> {
            String kind = exchange.getRequestHeaders().getFirst("Content-Type");
            String body = new String(exchange.getRequestBody().readAllBytes(), StandardCharsets.ISO_8859_1);
            boolean whole = body.contains("name=\"model\"") && body.contains("RIFF\r\n--\r\n");
            respond(exchange, whole ? "{\"text\":\"" + kind.replaceAll("boundary=[^;]*", "") + "\"}" : "{\"text\":\"\"}");
        });
        replica.start();
        Process proxy = new ProcessBuilder(System.getenv("WARMROUTE"), "serve", "--listen", AUDIO_PROXY, "--admin", "",
            "http://127.0.0.1:" + replica.getAddress().getPort()).inheritIO().start();
        Path audio = Files.createTempFile("speech ", ".wav");
        try {
            awaitReady(proxy);
            Files.writeString(audio, "RIFF\r\n--\r\n".repeat(1000));
            var transcription = client("http://" + AUDIO_PROXY).audio().transcriptions().create(
                TranscriptionCreateParams.builder().model("whisper").file(audio).language("en").build());
            String text = transcription.asTranscription().text();
            check("transcription: the form was " + text, !text.isEmpty());
        } finally {
            Files.delete(audio);
            proxy.destroyForcibly();
            proxy.waitFor();
            replica.stop(0);
        }
    }

    private static void respond(HttpExchange exchange, String body) throws IOException {
        byte[] bytes = body.getBytes(StandardCharsets.UTF_8);
        exchange.getResponseHeaders().set("Content-Type", "application/json");
        exchange.sendResponseHeaders(200, bytes.length == 0 ? -1 : bytes.length);
        exchange.getResponseBody().write(bytes);
        exchange.close();
    }

    private static void awaitReady(Process proxy) throws Exception {
        var ready = java.net.http.HttpRequest.newBuilder(java.net.URI.create("http://" + AUDIO_PROXY + "/readyz")).build();
        var http = java.net.http.HttpClient.newHttpClient();
        while (proxy.isAlive()) {
            try {
                if (http.send(ready, java.net.http.HttpResponse.BodyHandlers.discarding()).statusCode() == 200) {
                    return;
                }
            } catch (IOException notListening) {
                // tried again
            }
            Thread.sleep(100);
        }
        throw new IllegalStateException("warmroute ended");
    }

    private static OpenAIClient client(String url) {
        return OpenAIOkHttpClient.builder()
            .baseUrl(url + "/v1").apiKey("none").maxRetries(0).timeout(Duration.ofMinutes(2)).build();
    }

    private static void check(String what, boolean ok) {
        if (!ok) {
            throw new AssertionError(what);
        }
        System.out.println("ok: " + what);
    }
}
